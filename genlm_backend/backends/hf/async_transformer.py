"""AsyncTransformer: awaited log-probabilities of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, Unpack

from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.backends.hf.hf_loader import HFLoader, WeightFormat
from genlm_backend.backends.hf.options import HFOptions
from genlm_backend.backends.hf.picture_reader import PictureReader, check_processor
from genlm_backend.backends.loading import explained
from genlm_backend.checks import Check, Option, checks_of, shows_options, switch
from genlm_backend.errors import OptionError
from genlm_backend.model.batched_lm import BatchedLM, LMOptions, ProcessLM, RowOptions
from genlm_backend.readouts.sampling import ends_of_model
from genlm_backend.remote.process_evaluator import ProcessEvaluator


class TransformerOptions(HFOptions, RowOptions, total=False):
    """Keyword-only options of ``AsyncTransformer``, which documents them."""

    processor: Annotated[Any, Option(None, check_processor)]


class _OptionsByName(TransformerOptions, LMOptions):
    pass


class AsyncTransformer(ProcessLM):
    """A causal language model of transformers, batched and cached.

    Concurrent queries become padded batched forward passes on one worker thread. The keys and
    values of prefixes are cached, within a budget, and reused token by token. The recurrent states
    of state-space and linear-attention layers are cached after queried contexts. If a model cannot
    be cached, every context runs whole, and ``kv_reuse`` is ``False``.

    Several instances may use one model at the same time, and so may its owner: passes run in a
    private copy of its modules that shares the weights, or in the model itself if a trial of the
    copy fails. With a copy, the owner may load, activate and delete adapters without changing any
    row. The owner may not change weights or merge adapters into them.

    Args:
        hf_model: A causal language model, on any device; it is put into evaluation mode. Or the
            evaluator of a model in another process (``from_name(…, process=True)`` makes it).
        hf_tokenizer: Its tokenizer.
        batch_size: Distinct contexts in one batch, at most; a batch takes one or several forward
            passes.
        timeout: Seconds that the first query of a batch waits for others, at most.
        kv_cache_bytes: Bytes of the KV cache; 0 turns it off. Default: half of a CUDA device's free
            memory; on other devices, a quarter of the machine's free memory, at most 4 GiB.
        kv_cache_dtype: Format of cached keys and values: ``None`` for the type that the model
            computes in, "bfloat16", "float16", "int8" (a scale for each head of a token) or
            "uint4" (a scale and a zero point for up to 32 elements). Attention reads all keys and
            values as rounded to this format, new ones too. So a row is the same with and without
            cached tokens, up to floating-point rounding.
        host_cache_bytes: Bytes of host memory for keys, values and recurrent states that are
            evicted from a device, in the same format; they are copied back when a context needs
            them. On CUDA the memory is pinned, and all allocated at the start.
        state_cache_bytes: The part of ``kv_cache_bytes`` for the recurrent states of a model that
            has such layers (Mamba, Gated DeltaNet, …). Default: half, or all if no layer attends.
        row_cache_bytes: Bytes of log-probability rows to keep; 0 keeps none.
        output_device: Device of the returned rows: "cpu", "cuda:0", …
        num_threads: Threads of a forward pass on the CPU. Default: torch's own number.
        max_length: The longest context to accept. Default: the limit in the model's config.
        packs_weights: Whether to lay out the weights of linear layers for speed. On a CPU, they are
            copied into oneDNN's blocked layout, or FBGEMM's if float16 holds them, if a short trial
            of their shape is faster in it. The copies take at most a quarter of the free memory, up
            to 4 GiB (``packed_weight_bytes``).
            The model's own layers stay as they are, and rows change by rounding alone. Each trial
            runs once per process, so another process may decide differently. Default: ``True`` on a
            CPU, unless the model is in training mode and a parameter requires gradients;
            ``from_name`` sets ``True`` on all devices. On CUDA no copies are kept: the weights of
            projections that have the same input move next to each other, so that each group is one
            product. The parameters stay the same objects with the same values, but tensors that
            shared their memory share it no longer.
        process: ``True`` is for ``from_name``: a model object stays in the process that made it.
        self_check: Whether to compare a few probe texts with the bytes of their tokens.
        processor: The model's processor of texts and pictures, as ``AutoProcessor`` loads it, or a
            function that loads it; for ``context(…, images=[…])``.

    Do not convert, move, train or reconfigure the model afterwards, nor replace its layers or
    parameters (``model.half()``, ``model.to(…)``, ``model.train()``): otherwise queries raise
    ``ModelStateError`` until you undo the change.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If an option is out of bounds, or does not fit into memory.
        DeviceError: (``ValueError``) If ``output_device`` does not exist.
        UnsupportedModelError: (``ValueError``) For encoder-decoder models, and others that are no
            causal language models.
        TokenizerDecodeError: (``ValueError``) If the bytes of a token cannot be determined.

    Attributes:
        model_device: Device on which the model takes its token ids.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        **checks_of(TransformerOptions),
        "process": switch,
    }

    library_opts: ClassVar[str] = "hf_opts"

    @shows_options(TransformerOptions)
    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        process: bool = False,
        **options: Unpack[TransformerOptions],
    ) -> None:
        own, given = self._parted(locals())
        processor = given.pop("processor", None)
        if given.pop("process"):
            raise OptionError(
                "process=True needs a model that is loaded by name, since a model object stays in "
                f"the process that made it: use {type(self).__name__}.from_name(name, "
                "process=True)"
            )
        self._hf: HFEvaluator | ProcessEvaluator
        if isinstance(hf_model, ProcessEvaluator):
            for name, value in given.items():
                if value not in (None, False, 0):
                    raise OptionError(
                        f"the given evaluator runs in another process: pass {name} to the "
                        "function that makes this evaluator"
                    )
            self._hf = hf_model
        else:
            self._hf = HFEvaluator(hf_model, output_device=own["output_device"], **given)
        super().__init__(hf_tokenizer, self._hf, **own)
        token_id = self._info.image_token_id
        self._pictures = PictureReader(processor, self.contexts, token_id, self._asker())

    @classmethod
    @shows_options(_OptionsByName, packs_weights=True)
    def from_name(
        cls,
        model_id: str,
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        *,
        weights: WeightFormat | None = None,
        process: bool = False,
        **options: Unpack[_OptionsByName],
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_id: A repository on the hub, a local directory, or ``"smollm2"``.
            bitsandbytes_opts: For ``BitsAndBytesConfig``, such as ``{"load_in_8bit": True}`` or
                ``{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}`` (extra ``bitsandbytes``).
            hf_opts: For ``from_pretrained`` of ``AutoModelForCausalLM``, or of
                ``AutoModelForImageTextToText`` if the model reads pictures. Defaults:
                ``device_map="auto"``, ``dtype="auto"`` (``torch_dtype`` means the same).
                The tokenizer also gets ``revision``, ``token``, ``cache_dir``,
                ``local_files_only`` and ``trust_remote_code``, which is off by default.
            weights: ``"int8"`` for linear layers with weights of 8 bits and a scale for each
                output. These compute faster on a CPU and take a quarter of float32's memory; rows
                change a little. The model is first loaded in float32 onto the CPU.
            process: Whether to load and run the model in a child process, so that the model and the
                caller's Python do not wait for each other. The child ends with this process; if the
                child ends earlier, queries raise ``EngineDiedError`` until ``restart()``.
                ``num_threads`` and devices refer to the child, whose start adds a few seconds.
            **options: For the constructor; ``packs_weights`` defaults to ``True`` here.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown, of a wrong type, or cannot be
                pickled for a child process. Options are checked before anything is loaded, except
                those that only the model's own code knows.
            OptionError: (``ValueError``) If an option is out of bounds.
            DeviceError: (``ValueError``) If a device does not exist.
            ModelNotFoundError: (``OSError``) If there is no such model.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        is_elsewhere = switch("process", process)
        loader, own = HFLoader.of_name(model_id, bitsandbytes_opts, hf_opts, weights, options, cls)
        if is_elsewhere:
            loader.check_portable()
        with explained(model_id):
            tokenizer = loader.tokenizer()
            if is_elsewhere:  # the child loads the model on ``open()``
                return cls(ProcessEvaluator(loader), tokenizer, **own)
            model = loader.model()
        return cls(model, tokenizer, **own, **loader.evaluator)

    # ---------------------------------------------------------------- the model

    @property
    def model(self) -> Any:
        """The wrapped model; ``None`` if it runs in another process, or after ``close()``."""
        return None if isinstance(self._hf, ProcessEvaluator) else self._hf.scheduler.runner.model

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text; read anew at each access if the model is in this process."""
        if self.model is not None:
            self._own_eos = ends_of_model(self.model)
        return super().eos_token_ids

    @property
    def packed_weight_bytes(self) -> int:
        """Bytes of packed weights, in addition to the model's own weights."""
        return self._evaluator.counts().packed_weight_bytes
