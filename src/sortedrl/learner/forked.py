"""A learner in a process of its own, so that the engine and the loop have this process to themselves.

`run/builders/learner.py` puts it around a `SkippingLearner` when rollout goes on during updates. In a thread, an update
would take turns with the Python code of engine and loop. Here the process is copied (`os.fork`) when the learner is
ready: the copy has the model, the loss and everything of the user's, and nothing has to be described. It gets batches
over a `channel.py` and works on weights that both processes see, in shared memory. The loop publishes weights between
two updates, so nobody reads them while they change.

Guarantees: an update gives the same weights as in this process; an error of an update is raised here; the copy ends
when this process ends, in whatever way; it never writes files of the run, except a batch that stops the run.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NoReturn

import torch

from sortedrl import errors
from sortedrl.channel import Channel, ChannelClosed, Message, Numbers
from sortedrl.errors import LearnerError, SortedRLError
from sortedrl.learner.base import Update, UpdateResult
from sortedrl.learner.unscored import SkippingLearner, UnscoredSamples, empty_update
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment
from sortedrl.weights import ModuleWeights

_ALIGN = 64  # bytes
_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that stop a run: the process that asked for it decides
# What of a sample an update may read. The rest belongs to the buffer.
_FIELDS = ("id", "index", "epoch", "cohort", "seed", "budget", "attempt", "reward", "reward_attempt", "known_length")


class ForkedLearner:
    """Runs the updates of `learner`, which must not have its own thread, in a copy of this process."""

    def __init__(self, learner: SkippingLearner) -> None:
        self._learner = learner
        self._unscored = UnscoredSamples()
        self._source = ModuleWeights(learner.model)
        share_weights(learner.model.parameters())
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(learner, theirs)
        theirs.close()
        self._channel = Channel(ours)
        self._update: _ForkedUpdate | None = None

    @property
    def source(self) -> ModuleWeights:
        """The live weights. They change only while an update is under way."""
        return self._source

    @property
    def model(self) -> Any:
        return self._learner.model

    @property
    def optimizer(self) -> Any:
        """The optimizer as it was when the process was copied, with the learning rate of the last update."""
        return self._learner.optimizer

    def skip(self, sample: int, attempt: int) -> None:
        """Leave the answer of this attempt out of its update. An answer with other tokens counts again."""
        self._unscored.add(sample, attempt)

    def start(self, batch: Batch) -> Update:
        assert self._update is None or self._update.done(), "an update is under way: wait for its result first"
        scored = self._unscored.remove_from(batch)
        if scored is None:
            return empty_update()
        header, numbers = pack_batch(scored)
        self._send(["update", header], numbers.data)
        self._update = _ForkedUpdate(self)
        return self._update

    def state_dict(self) -> dict[str, Any]:
        self._send(["state"])
        (state, places), data = self.answer()
        return {**state, "optimizer": _unpack_tensors(places, data), "left_out": self._unscored.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        plain = {name: value for name, value in state.items() if name not in ("optimizer", "left_out")}
        places, data = _pack_tensors(state["optimizer"])
        self._send(["load", plain, places], data)
        self.answer()
        self._unscored.load(state.get("left_out", []))

    def close(self) -> None:
        """End the process: it ends when its socket is closed."""
        if self._pid == 0:
            return
        self._channel.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._pid = 0
        self._learner.close()

    def answer(self) -> Message:
        """Wait for the answer to the last command; raises the error that it brings."""
        found = self.poll_answer(None)
        assert found is not None, "a wait without a limit brought nothing"
        return found

    def poll_answer(self, timeout: float | None = 0.0) -> Message | None:
        try:
            message = self._channel.receive(timeout)
        except ChannelClosed as error:
            raise self._death() from error
        if message is None or message.header[0] == "ok":
            return message if message is None else Message(message.header[1], message.data)
        _, kind, text = message.header
        known: Any = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, SortedRLError):
            raise known(text)
        raise LearnerError(f"the update failed ({kind}: {text}): resume the run")

    def record_rate(self, metrics: Mapping[str, float]) -> None:
        for group in self._learner.optimizer.param_groups:
            group["lr"] = metrics.get("lr", group["lr"])

    def _send(self, header: list[Any], data: bytes | bytearray = b"") -> None:
        try:
            self._channel.send(header, data)
        except ChannelClosed as error:
            raise self._death() from error

    def _death(self) -> LearnerError:
        code = 0
        with contextlib.suppress(ChildProcessError):
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        return LearnerError(f"the learner's process has ended ({why}): see whether memory ran out, then resume the run")


class _ForkedUpdate:
    """An update under way in the other process."""

    def __init__(self, learner: ForkedLearner) -> None:
        self._learner = learner
        self._result: Future[UpdateResult] = Future()

    def done(self) -> bool:
        if not self._result.done():
            self._take(0.0)
        return self._result.done()

    def result(self) -> UpdateResult:
        if not self._result.done():
            self._take(None)
        return self._result.result()

    def _take(self, timeout: float | None) -> None:
        try:
            message = self._learner.poll_answer(timeout)
        except SortedRLError as error:
            self._result.set_exception(error)
            return
        if message is not None:
            steps, metrics = message.header
            self._learner.record_rate(metrics)
            self._result.set_result(UpdateResult(optimizer_steps=steps, metrics=metrics))


# ---- weights in shared memory ----------------------------------------------------------------------------------------


def share_weights(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Move the parameters that are trained into memory that this process shares with its copies."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    sizes = [-(-p.numel() * p.element_size() // _ALIGN) * _ALIGN for p in trained]
    memory = mmap.mmap(-1, max(sum(sizes), 1))  # anonymous: it is gone with the last process that has it
    start = 0
    for parameter, size in zip(trained, sizes, strict=True):
        place = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=start)
        place = place.view(parameter.shape)
        place.copy_(parameter.data)
        parameter.data = place
        start += size


# ---- the other process -----------------------------------------------------------------------------------------------


def _serve(learner: SkippingLearner, end: socket.socket) -> NoReturn:
    """The program of the copy. It never returns."""
    code = 1
    try:
        _leave_parent(end.fileno())
        channel = Channel(end)
        while True:
            message = channel.receive(None)
            assert message is not None, "a wait without a limit brought nothing"
            try:
                header, data = _run(learner, message)
            except Exception as error:  # raised again by the process that asked
                lines = str(error).strip().splitlines() or [""]
                text = str(error) if isinstance(error, SortedRLError) else lines[0]
                channel.send(["error", type(error).__name__, text])
            else:
                channel.send(["ok", header], data)
    except ChannelClosed:
        code = 0
    finally:
        os._exit(code)


def _leave_parent(fd: int) -> None:
    """Let go of what belongs to the other process: signals, open files, its terminal. End when it ends."""
    os.setsid()
    for number in _OURS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # what was there before the copy is not collected here
    threading.Thread(target=_end_with_owner, args=(fd,), name="owner-watch", daemon=True).start()


def _end_with_owner(fd: int) -> None:
    watch = select.poll()
    watch.register(fd, 0)  # a hang-up is reported without being asked for
    watch.poll()
    os._exit(0)


def _run(learner: SkippingLearner, message: Message) -> tuple[Any, bytes | bytearray]:
    """Do what a message says; returns the header and the bytes of the answer."""
    match message.header:
        case ["update", header]:
            result = learner.start(unpack_batch(header, Numbers(message.data))).result()
            return [result.optimizer_steps, result.metrics], b""
        case ["state"]:
            state = learner.state_dict()
            places, data = _pack_tensors(state.pop("optimizer"))
            return [state, places], data
        case ["load", state, places]:
            learner.load_state_dict({**state, "optimizer": _unpack_tensors(places, message.data)})
            return None, b""
        case _:
            raise AssertionError(f"unknown command {message.header[0]}")


# ---- what passes between them ----------------------------------------------------------------------------------------


def pack_batch(batch: Batch) -> tuple[list[Any], Numbers]:
    numbers = Numbers()
    samples = [_pack_sample(sample, numbers) for sample in batch.samples]
    return [batch.update, batch.version, batch.progress, samples], numbers


def unpack_batch(header: list[Any], numbers: Numbers) -> Batch:
    update, version, progress, samples = header
    return Batch(
        update=update,
        version=version,
        progress=progress,
        samples=tuple(_unpack_sample(record, numbers) for record in samples),
    )


def _pack_sample(sample: Sample, numbers: Numbers) -> list[Any]:
    prompt = sample.prompt
    segments: list[Any] = []
    num_prompt = numbers.put("q", prompt.tokens)
    for s in sample.segments:
        numbers.put("q", s.tokens)
        numbers.put("d", s.logprobs)
        segments.append([s.version, len(s.tokens), s.slot_s, s.is_masked])
    reason = None if sample.finish_reason is None else sample.finish_reason.value
    plain = [getattr(sample, name) for name in _FIELDS]
    return [plain, [prompt.id, num_prompt, prompt.content, dict(prompt.columns)], segments, reason]


def _unpack_sample(record: list[Any], numbers: Numbers) -> Sample:
    plain, (prompt_id, num_prompt, content, columns), packed, reason = record
    prompt = Prompt(id=prompt_id, tokens=tuple(numbers.get("q", num_prompt)), content=content, columns=columns)
    segments: list[Segment] = []
    for version, count, slot_s, is_masked in packed:
        tokens, logprobs = numbers.get("q", count), numbers.get("d", count)
        segments.append(Segment(version, tokens, logprobs, slot_s, is_masked))
    return Sample(
        **dict(zip(_FIELDS, plain, strict=True)),
        prompt=prompt,
        segments=segments,
        finish_reason=None if reason is None else FinishReason(reason),
    )


def _pack_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Any], bytes]:
    places = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]
    parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return places, b"".join(part.numpy().tobytes() for part in parts)


def _unpack_tensors(places: list[Any], data: bytes) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    memory, start = bytearray(data), 0
    for name, dtype_name, shape in places:
        dtype = getattr(torch, dtype_name)
        count = int(torch.Size(shape).numel())
        tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape).clone()
        start += count * dtype.itemsize
    return tensors
