"""A child process that recomputes steps of a run, for an audit to compare.

The protocol is in `worker.recompute`, which has the model and torch.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from coordinator.audit.recomputed import RecomputedStep
from coordinator.storage.directory.run_directory import RunDirectory, StoredRun
from protocol.base.errors import SamestepError, UsageError, error_for
from protocol.cli.command_line import child_environment, command_of
from protocol.spec.manifest import Manifest


class Recomputing:
    """Recomputes steps of one run; leaving its context ends the process.

    Args:
        directory: Directory of the run.

    Raises:
        UsageError: The run's steps cannot be recomputed with the same bits.
        SamestepError: The run's model or data are not on this machine.
    """

    def __init__(self, directory: Path) -> None:
        run_directory = RunDirectory(directory)
        run, self._manifest = _checked(
            run_directory.read_run(), run_directory.read_manifest(), directory
        )
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed at exit)
        self._worker = subprocess.Popen(  # noqa: S603  (our own command)
            [*command_of("worker"), "recompute"], env=child_environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._requests: IO[bytes] = self._worker.stdin
        self._responses: IO[bytes] = self._worker.stdout
        try:
            spec = json.loads(run.spec.to_bytes())
            self._request({"spec": spec, "manifest_digest": self._manifest.digest()}, ())
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.kill()
        self._worker.communicate()
        self._stderr.close()

    def __call__(
        self, step: int, loss_scale: float, parameters: Sequence[NDArray[np.float32]]
    ) -> RecomputedStep:
        """Recompute a step that starts from these parameters.

        Raises:
            SamestepError: The step cannot be recomputed here.
        """
        answer = self._request({"step": step, "loss_scale": loss_scale}, parameters)
        averages = [
            np.frombuffer(self._read(4 * block.elements), np.float32)
            for block in self._manifest.blocks
        ]
        return RecomputedStep(float(answer["loss"]), averages)

    def _request(
        self, document: dict[str, Any], arrays: Sequence[NDArray[np.float32]]
    ) -> dict[str, Any]:
        try:
            self._requests.write(json.dumps(document).encode() + b"\n")
            for array in arrays:
                self._requests.write(array.tobytes())
            self._requests.flush()
        except BrokenPipeError:
            raise self._exit_error() from None
        line = self._responses.readline()
        if not line.endswith(b"\n"):
            raise self._exit_error()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _read(self, count: int) -> bytes:
        content = self._responses.read(count)
        if len(content) < count:
            raise self._exit_error()
        return content

    def _exit_error(self) -> SamestepError:
        """Return an error with the last line that the process wrote."""
        code = self._worker.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last_line = lines[-1].removeprefix("worker: ") if lines else f"it ended with {code}"
        text = f"--recompute needs the run's model and data on this machine: {last_line}"
        return error_for(code, text)


def _checked(
    run: StoredRun | None, manifest: Manifest | None, directory: Path
) -> tuple[StoredRun, Manifest]:
    if run is None or manifest is None:
        raise UsageError(f"expected a run that has begun in {str(directory)!r}, found none")
    if not run.spec.arithmetic.is_canonical:
        raise UsageError(
            "--recompute: expected a run with arithmetic=canonical, got native: only machines of "
            "one numerics profile compute its bits; leave --recompute out"
        )
    if run.spec.replicas is not None or manifest.capture is not None:
        raise UsageError(
            "--recompute: expected a run that averages gradients, got one with replicas or a "
            "capture; leave --recompute out"
        )
    return run, manifest
