"""Uploads of steps: what arrives, and that no byte is written over while somebody reads it."""

from typing import Any

import numpy as np
import pytest
import torch

from rayserve_kernels.staging import StepUploads, lay_out

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(12, dtype=np.int32).reshape(3, 4),
    np.zeros(0, np.int32),
    np.array([7], np.int32),
]


def test_arrays_arrive_as_they_are() -> None:
    uploads = StepUploads(torch.device("cpu"))
    for factor in (1, 3, 50):
        arrays = [np.tile(array, factor) for array in ARRAYS]
        for array, tensor in zip(arrays, uploads.upload(arrays), strict=True):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % array.itemsize == 0
            np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_a_strided_array_arrives_in_its_logical_order() -> None:
    uploads = StepUploads(torch.device("cpu"))
    strided = np.arange(24, dtype=np.int32).reshape(4, 6)[:, 1::2]
    (tensor,) = uploads.upload([strided])
    np.testing.assert_array_equal(tensor.numpy(), strided)


def test_equal_shapes_lie_at_equal_places() -> None:
    specs, size_bytes = lay_out(ARRAYS)
    assert [spec.begin % 16 for spec in specs] == [0] * 4
    assert size_bytes == 48 + 48 + 0 + 16
    assert lay_out([array + 1 for array in ARRAYS]) == (specs, size_bytes)


def test_an_upload_holds_while_the_next_one_is_made() -> None:
    uploads = StepUploads(torch.device("cpu"))
    (first,) = uploads.upload([np.array([1, 2], np.int32)])
    uploads.upload([np.array([3, 4], np.int32)])
    assert first.tolist() == [1, 2]


class LateDevice:
    """A device module whose copies to the device happen when somebody waits for their event.

    Stands for torch.cuda: a copy that is enqueued reads its bytes at any time until then.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.unread: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self

        class Event:
            name = ""

            def record(self, stream: "Stream") -> None:
                device.log.append(f"{stream.name} records")
                self.name = stream.name

            def synchronize(self) -> None:
                if self.name:
                    device.log.append(f"host waits for {self.name}")
                # Whatever was enqueued is read now, as it lies there now.
                for source, seen in device.unread:
                    assert torch.equal(source, seen), "written over before it was read"
                device.unread.clear()

        class Stream:
            def __init__(self, _device: torch.device | None = None, name: str = "copies") -> None:
                self.name = name

            def wait_event(self, event: Event) -> None:
                if event.name:
                    device.log.append(f"{self.name} waits for {event.name}")

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        self.Event, self.Stream = Event, Stream
        self._compute = Stream(name="compute")

    def current_stream(self, _device: torch.device) -> Any:  # noqa: ANN401
        return self._compute

    def stream(self, stream: Any) -> Any:  # noqa: ANN401
        return stream


def test_b28_pinned_bytes_are_written_again_only_when_the_device_has_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: late)
    uploads = StepUploads(torch.device("cpu"))
    for step in range(6):
        uploads.upload([np.full(8, step, np.int32)])
        slot = uploads._slots[uploads._last]
        assert slot is not None
        source = slot.host[:32]
        late.unread.append((source, source.clone()))
    assert late.log == [
        # New bytes are the device's only when what was enqueued before is done.
        *("compute records", "copies waits for compute"),
        *("copies records", "compute waits for copies"),
        *("compute records", "compute records", "copies waits for compute"),
        *("copies records", "compute waits for copies"),
        *(
            # The step before has been enqueued; its bytes are those that the one after this takes.
            "compute records",
            "host waits for copies",
            # The device's bytes are written again when the step that reads them is done.
            "copies waits for compute",
            "copies records",
            "compute waits for copies",
        )
        * 4,
    ]
