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
    """Options of ``AsyncTransformer``, which explains them, that are given by name."""

    processor: Annotated[Any, Option(None, check_processor)]


class _OptionsByName(TransformerOptions, LMOptions):
    pass


class AsyncTransformer(ProcessLM):
    """A causal language model of transformers, batched and cached.

    All concurrent awaits become padded batched forward passes on one worker thread; the keys and
    values of every prefix seen are kept, within a budget, and reused token by token; of layers of
    state-space models and linear attention, the states behind what was asked. A model of which
    nothing can be kept answers as well, by running every context whole; ``kv_reuse`` tells.

    Several of these may use one model at the same time, and so may its owner: it is never touched,
    and what is computed runs in a private copy of its modules, which shares the weights. Adapters
    of the owner may be loaded, activated and deleted, and no row changes. Its weights may not be
    changed, nor adapters merged into them.

    Args:
        hf_model: A causal language model, on whatever device; it is put into evaluation mode. Or
            an evaluator of one that lives in another process, as ``from_name`` makes it.
        hf_tokenizer: Its tokenizer.
        batch_size: Distinct contexts in one batch, at most, which takes one forward pass or
            several.
        timeout: Seconds that the first query of a batch may wait for others, at most.
        kv_cache_bytes: Bytes of keys and values to keep; 0 keeps none. Default: half of a CUDA
            device's free memory, or a quarter of the machine's, 4 GiB at most.
        kv_cache_dtype: Number format in which keys and values are kept: ``None`` for the type that
            the model computes in, "bfloat16", "float16", "int8" (a scale for each head of a token)
            or "uint4" (a scale and a zero point for each 32 elements). Tokens attend to what is
            kept, so that a row depends on its context and the format alone, and neither on what is
            cached nor on how the context came to be.
        host_cache_bytes: Bytes of keys, values and recurrent states to keep in the memory of the
            host, in the same format, when they have to leave a device for others; they are fetched
            when a context wants them. On CUDA the memory is pinned, and taken at once.
        state_cache_bytes: Bytes, of those of ``kv_cache_bytes``, to keep recurrent states in, of a
            model that has such layers (Mamba, Gated DeltaNet, …). Default: half of them, or all
            where no layer attends.
        row_cache_bytes: Bytes of log-probability rows to keep; 0 keeps none.
        output_device: Where rows are returned: "cpu", "cuda:0", …
        num_threads: Threads of a forward pass on the CPU. Default: torch's own number.
        max_length: The longest context to accept. Default: what the model's config says.
        packs_weights: Whether linear layers get their weights a second time, in the layout that
            this processor reads fastest, where a short trial says that it is faster;
            ``packed_weight_bytes`` tells how much memory that takes, a quarter of what is free
            and 4 GiB at most. The model's own layers stay as they are, and rows are the same but
            for rounding. What is tried holds for the process; another may find otherwise. On CUDA
            nothing is kept twice: the weights of projections with one input are moved next to each
            other, so that each group is one product. The parameters stay the same objects with the
            same values, but other tensors over their old memory are theirs no longer.
        process: ``True`` is for ``from_name``: a model object lives where it has been made.
        self_check: Compare a few probe texts with the bytes of their tokens.
        processor: What makes the model's inputs of texts and pictures, as ``AutoProcessor`` loads
            it, or a function that does; for ``context(…, images=[…])``.

    The model is not to be converted, moved, put into training mode, configured otherwise or given
    other layers or parameters afterwards (``model.half()``, ``model.to(…)``, ``model.train()``):
    queries are a ``ModelStateError`` then, until it is as it was.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or does not fit into memory.
        DeviceError: (``ValueError``) If ``output_device`` is not there.
        UnsupportedModelError: (``ValueError``) For encoder-decoder models.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token cannot be known.

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
                "process=True is for a model that is loaded by name, since an object stays in "
                f"the process that made it: {type(self).__name__}.from_name(name, process=True)"
            )
        self._hf: HFEvaluator | ProcessEvaluator
        if isinstance(hf_model, ProcessEvaluator):
            for name, value in given.items():
                if value not in (None, False, 0):
                    raise OptionError(f"{name} is for what makes the evaluator over there")
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
            hf_opts: For ``AutoModelForCausalLM.from_pretrained``. Defaults:
                ``device_map="auto"``, ``dtype="auto"`` (``torch_dtype`` means the same).
                ``revision``, ``token``, ``cache_dir`` and ``trust_remote_code``, which stays off
                unless it is asked for, go to the tokenizer too.
            weights: ``"int8"`` for weights of 8 bits with a scale for each output, which compute
                faster on a CPU and take a quarter of the memory; rows change a little. The model is
                loaded in float32 onto the CPU first.
            process: Whether the model is loaded, and computes, in a process of its own, so that it
                and the Python of callers do not wait for each other. It ends with this process;
                where it ends before, queries are an ``EngineDiedError`` until ``restart()``.
                ``num_threads`` and devices are those over there. The first tokens of a model take
                a few seconds longer to come.
            **options: For the constructor; ``packs_weights`` is ``True`` unless it is given.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type, or cannot
                be given to another process; as with the next two, nothing is loaded then.
            OptionError: (``ValueError``) If one is out of its bounds.
            DeviceError: (``ValueError``) If a device is not there.
            ModelNotFoundError: (``OSError``) If there is no such model.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        is_elsewhere = switch("process", process)
        loader, own = HFLoader.of_name(model_id, bitsandbytes_opts, hf_opts, weights, options, cls)
        if is_elsewhere:
            loader.check_portable()
        with explained(model_id):
            tokenizer = loader.tokenizer()
            if is_elsewhere:  # where it is loaded when it is asked what it is able to do
                return cls(ProcessEvaluator(loader), tokenizer, **own)
            model = loader.model()
        return cls(model, tokenizer, **own, **loader.evaluator)

    # ---------------------------------------------------------------- keys and values

    @property
    def model(self) -> Any:
        """The model as it was given; ``None`` in another process and after ``close()``."""
        return None if isinstance(self._hf, ProcessEvaluator) else self._hf.scheduler.runner.model

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text, as the model's generation config names them now."""
        if self.model is not None:
            self._own_eos = ends_of_model(self.model)
        return super().eos_token_ids

    @property
    def packed_weight_bytes(self) -> int:
        """Number of bytes of packed weights, beside the model's own."""
        return self._evaluator.counts().packed_weight_bytes
