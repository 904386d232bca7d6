"""Functions of tensors, recorded once and replayed on what their inputs hold then: what a kernel launch costs is saved.

On CUDA devices a recording is a CUDA graph. Elsewhere it is an FX graph, which saves nothing but runs the very same
functions from the very same buffers: what can not be captured, or depends on values that were there while it was
recorded, shows on any machine.

A recorded function reads its inputs where they lie, reads no value back on the host, and makes no shape that depends on
one. It is run several times while it is recorded, so running it twice must do what running it once does.
"""

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WARM_UPS = 3  # runs before a capture: kernels are compiled and workspaces made there
Outputs = TypeVar("Outputs", bound=tuple[Any, ...])
Outputs_co = TypeVar("Outputs_co", covariant=True)
_HOST_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__})


class Recording(Protocol[Outputs_co]):
    """A recorded function."""

    def replay(self) -> Outputs_co:
        """Run it on what its inputs hold now. The outputs hold until the next replay of any recording."""


class CudaRecording(Generic[Outputs]):
    """A CUDA graph. All graphs of one engine share their memory: only one of them runs at a time."""

    def __init__(self, function: Callable[..., Outputs], inputs: tuple[Tensor, ...], pool: Any) -> None:
        device = inputs[0].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Other threads of a server may use the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._outputs = function(*inputs)

    def replay(self) -> Outputs:
        """See `Recording.replay`."""
        self._graph.replay()
        return self._outputs


class FxRecording(Generic[Outputs]):
    """An FX graph; `kind` puts its outputs together."""

    def __init__(
        self, function: Callable[..., Outputs], inputs: tuple[Tensor, ...], kind: Callable[..., Outputs]
    ) -> None:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds

        self._inputs, self._kind = inputs, kind
        with _NoHostReads():
            self._graph = make_fx(lambda *tensors: tuple(function(*tensors)))(*inputs)
        for node in self._graph.graph.nodes:
            assert not _shape_depends_on_data(node), f"recorded, but its shape depends on data: {node.format_node()}"

    def replay(self) -> Outputs:
        """See `Recording.replay`."""
        return self._kind(*self._graph(*self._inputs))


class Recorder:
    """The recordings of one engine, each made when it is first asked for."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.device = device
        self.most = most
        self.num_replays = 0
        self._made: dict[Hashable, tuple[tuple[Tensor, ...], Recording[Any]]] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def num_recordings(self) -> int:
        """Recordings so far, at most `most`."""
        return len(self._made)

    def takes(self, key: Hashable) -> bool:
        """Whether there is a recording for `key`, or room for one more."""
        return key in self._made or len(self._made) < self.most

    def run(
        self,
        key: Hashable,
        function: Callable[..., Outputs],
        values: tuple[Tensor, ...],
        kind: Callable[..., Outputs],
    ) -> Outputs:
        """Replay the function that `key` stands for on these values, recorded first if need be.

        `key` fixes the function and the shapes of the values, which may lie on any device. `function` takes as many
        tensors and returns a NamedTuple `kind` of tensors and None.
        """
        if key in self._made:
            inputs, recording = self._made[key]
            _fill(inputs, values)
        else:
            assert self.takes(key), "no room for another recording"
            inputs = tuple(torch.empty_like(value, device=self.device) for value in values)
            _fill(inputs, values)
            recording = self._record(function, inputs, kind)
            self._made[key] = inputs, recording
        self.num_replays += 1
        outputs: Outputs = recording.replay()
        return outputs

    def _record(
        self, function: Callable[..., Outputs], inputs: tuple[Tensor, ...], kind: Callable[..., Outputs]
    ) -> Recording[Outputs]:
        if self.device.type == "cuda":
            return CudaRecording(function, inputs, self._pool)
        return FxRecording(function, inputs, kind)


def _fill(inputs: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for buffer, value in zip(inputs, values, strict=True):
        buffer.copy_(value)


class _NoHostReads(TorchFunctionMode):
    """Refuses what would stop a capture: tracing alone takes the values that lists are made of for constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _HOST_READS, f"a recorded function reads values back: {func.__name__}"
        return func(*args, **(kwargs or {}))


def _shape_depends_on_data(node: Any) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        indices = [index for index in node.args[1] if index is not None]
        return any(index.meta["tensor_meta"].dtype == torch.bool for index in indices)
    return torch.Tag.dynamic_output_shape in node.target.tags
