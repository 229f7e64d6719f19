"""Adapters of every kind that PEFT makes, saved with random weights, and the models they are of."""

import copy
import importlib

import torch

from tests.llm import families


class _Peft:
    """PEFT, imported when it is first needed: collecting the tests need not wait for it."""

    def __getattr__(self, name):
        return getattr(importlib.import_module("peft"), name)


peft = _Peft()

ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _lora(**options):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **options}
    return peft.LoraConfig(**settings)


KINDS = {
    "lora": lambda: _lora(),
    "lora-all": lambda: _lora(target_modules=ALL, r=3),
    "lora-linear": lambda: _lora(target_modules="all-linear"),
    "lora-regex": lambda: _lora(target_modules=r".*layers\.1\..*(q|down)_proj"),
    "lora-patterns": lambda: _lora(
        target_modules=ALL, rank_pattern={"q_proj": 2}, alpha_pattern={"down_proj": 3}
    ),
    "rslora": lambda: _lora(use_rslora=True),
    "dora": lambda: _lora(use_dora=True, target_modules=ALL),
    "lora-bias": lambda: _lora(lora_bias=True),
    "lora-layer": lambda: _lora(layers_to_transform=[1]),
    "lora-embeddings": lambda: _lora(target_modules=["embed_tokens", "q_proj"]),
    "lora-head": lambda: _lora(target_modules=["lm_head", "v_proj"]),
    "lora-norms": lambda: _lora(modules_to_save=["norm"]),
    "save-head": lambda: _lora(modules_to_save=["lm_head"]),
    "save-embeddings": lambda: _lora(modules_to_save=["embed_tokens"]),
    "save-both": lambda: _lora(modules_to_save=["embed_tokens", "lm_head"]),
    "save-mlp": lambda: _lora(modules_to_save=["mlp"]),
    "dora-save-head": lambda: _lora(use_dora=True, modules_to_save=["lm_head"]),
    "tokens": lambda: _lora(trainable_token_indices=[3, 5, 7]),
    "only-tokens": lambda: peft.TrainableTokensConfig(
        token_indices=[5, 7, 9], target_modules=["embed_tokens"]
    ),
    "lora-parameters": lambda: _lora(
        target_modules=[], target_parameters=["q_proj.weight", "up_proj.weight"]
    ),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=8, target_modules=ALL),
    "lokr": lambda: peft.LoKrConfig(r=4, alpha=8, target_modules=ATTENTION),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=8, target_modules=ATTENTION),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=ATTENTION),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"]),
    "vera-unsaved": lambda: peft.VeraConfig(
        r=8, target_modules=["q_proj", "o_proj"], save_projection=False
    ),
    "adalora": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, target_modules=ATTENTION
    ),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=ATTENTION),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=ATTENTION),
    "vblora": lambda: peft.VBLoRAConfig(
        r=4, num_vectors=20, vector_length=8, topk=2, target_modules=ATTENTION
    ),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "c3a": lambda: peft.C3AConfig(block_size=8, target_modules=ATTENTION),
    "miss": lambda: peft.MissConfig(r=4, target_modules=ATTENTION),
    "road": lambda: peft.RoadConfig(group_size=8, target_modules=ATTENTION),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=ATTENTION),
    "delora": lambda: peft.DeloraConfig(r=4, target_modules=ATTENTION),
    "gralora": lambda: peft.GraloraConfig(r=4, gralora_k=2, target_modules=ATTENTION),
    "velora": lambda: _lora(velora_config=peft.VeloraConfig()),
    "kasa": lambda: _lora(kasa_config=peft.KasaConfig()),
    "bdlora": lambda: _lora(
        use_bdlora=peft.BdLoraConfig(nblocks=2, match_strict=False, target_modules_bd_a=["q_proj"])
    ),
    "poly": lambda: peft.PolyConfig(r=4, n_tasks=1, n_skills=2, target_modules=ATTENTION),
    "supertuning": lambda: peft.SupertuningConfig(target_modules=ATTENTION),
    "shadow": lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
    "cpt": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2]
    ),
    "glora": lambda: peft.GloraConfig(r=4, target_modules=ATTENTION),
    "hira": lambda: peft.HiraConfig(r=4, target_modules=ATTENTION),
    "lily": lambda: peft.LilyConfig(r=4, target_modules=ATTENTION),
    "osf": lambda: peft.OSFConfig(target_modules=ATTENTION, effective_rank=8),
    "psoft": lambda: peft.PsoftConfig(r=4, target_modules=ATTENTION),
    "pvera": lambda: peft.PveraConfig(r=8, target_modules=["q_proj", "o_proj"]),
    "tinylora": lambda: peft.TinyLoraConfig(r=2, target_modules=ATTENTION),
    "unilora": lambda: peft.UniLoraConfig(r=4, theta_d_length=64, target_modules=ATTENTION),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=20, target_modules=ATTENTION),
    "deft": lambda: peft.DeftConfig(r=4, target_modules=ATTENTION),
    "beft": lambda: peft.BeftConfig(target_modules=["v_proj"]),
    "peanut": lambda: peft.PeanutConfig(r=4, target_modules=ATTENTION),
    "frod": lambda: peft.FrodConfig(target_modules=ATTENTION),
    "bias-all": lambda: _lora(bias="all"),
    "bias-lora": lambda: _lora(bias="lora_only"),
    "pissa": lambda: _lora(init_lora_weights="pissa"),
    "olora": lambda: _lora(init_lora_weights="olora"),
    "replicated": lambda: _lora(layer_replication=[(0, 2), (1, 2)]),
    "alora": lambda: _lora(alora_invocation_tokens=[5, 6], task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
    ),
    "adaption": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
    ),
}

REFUSED = {
    "bias-all": "changes the model's own weights",
    "bias-lora": "changes the model's own weights",
    "kasa": "changes the model's own weights",
    "poly": "task_ids",
    "lily": "depend on how a context is computed",
    "shadow": "Shadow state",
    "cpt": "changes the context",
    "pissa": "changes the model's own weights",
    "olora": "changes the model's own weights",
    "replicated": "layer_replication",
    "alora": "alora_invocation_tokens",
    "prompt": "changes the context",
    "prefix": "changes the context",
    "p-tuning": "changes the context",
    "adaption": "changes the context",
}
"""What is no change of layers, and how that is told."""


FREQUENT = tuple(KINDS)[: tuple(KINDS).index("norms")]
"""Kinds tried by default; so is what is refused."""


def make_base(name):
    """A model whose weights are not all of one size; "tied" has one matrix for both ends."""
    if name == "tied":
        model = families.make("gemma")
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        return model
    return families.make(name)


def save(kind, base, folder, seed=0):
    """Write an adapter with random weights."""
    torch.manual_seed(seed)
    if kind == "adaption":  # which PEFT makes for few families
        base = families.make("llama")
    model = peft.get_peft_model(copy.deepcopy(base), KINDS[kind]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.3 * noise.to(parameter.dtype)
    model.save_pretrained(str(folder))


def fresh(base, folder):
    """PEFT's own model of a saved adapter, over a copy of the base model."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval()
