"""A recorder of decode steps on the processor, as strict as one of CUDA graphs.

The second run's operators are written down with the tensors that they were given, and a replay is
these and nothing else: what Python decided stays as it was, numbers and branches alike. Between two
replays all memory of a pass is NaN, but its inputs and its logits.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_of(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Log(TorchDispatchMode):
    """Operators in the order in which they ran: function, arguments, and results of their own."""

    current = None

    def __init__(self, on_device):
        super().__init__()
        self.calls, self.kept = [], []
        self.on_device = {memory(tensor) for tensor in on_device}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.split("::")[1]
        if name in WAITS and self.is_on_device((args, kwargs)):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = function(*args, **kwargs)
        self.note(function, args, kwargs, found, function._schema.is_mutable)
        return found

    def is_on_device(self, tree):
        return any(memory(tensor) in self.on_device for tensor in tensors_of(tree))

    def note(self, function, args, kwargs, found, is_mutable):
        given = {memory(tensor) for tensor in tensors_of((args, kwargs))}
        results = tensors_of(found)
        self.kept.append((args, kwargs, results))
        if self.is_on_device((args, kwargs)):
            self.on_device |= {memory(tensor) for tensor in results}
        own = None
        if not is_mutable:
            own = [None if memory(tensor) in given else tensor for tensor in results]
        if is_mutable or any(tensor is not None for tensor in own):
            baked = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            self.calls.append((function, *baked, own))


def as_operator(function):
    """Have a log take a function for one operator."""

    def noted(*args):
        log = Log.current
        if log is None:
            return function(*args)
        with _disable_current_modes():
            found = function(*args)
            log.note(function, args, {}, found, False)
        return found

    return noted


class StrictRecorder:
    """What stands for ``CudaGraphCapturer``; ``replayed`` has an element for each replay."""

    def __init__(self, replayed):
        self.replayed = replayed

    def forget(self):
        """Forget nothing: replays know all that they need."""

    def record(self, run):
        run()
        seen = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
        graphs, view, arrays = (seen[name].cell_contents for name in ("self", "view", "arrays"))
        kept = [codes for of_layer in graphs._pool.codes for codes in of_layer]
        module = view.module
        on_device = [*arrays.arrays.values(), *kept, *module.parameters(), *module.buffers()]
        Log.current = log = Log(on_device)
        try:
            with log:
                found = run()
        finally:
            Log.current = None
        between = [
            tensor
            for *_, own in log.calls
            for tensor in own or ()
            if tensor is not None
            and tensor.is_floating_point()
            and memory(tensor) != memory(found)
            and log.is_on_device(tensor)
        ]

        @torch.inference_mode()
        def replay():
            self.replayed.append(1)
            for function, args, kwargs, own in log.calls:
                results = tensors_of(function(*args, **kwargs))
                for result, tensor in zip(results, own or (), strict=False):
                    if tensor is not None:
                        tensor.copy_(result)
            for tensor in between:
                tensor.fill_(torch.nan)

        found.fill_(torch.nan)
        return replay, found
