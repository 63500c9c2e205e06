"""One exception tree; every error a user can meet says what to change.

    ParaLLMError
    ├── ConfigError                 a flag, a key or a combination of them is wrong
    ├── ModelError
    │   ├── ModelNotFoundError      no such directory or hub id
    │   └── UnsupportedModelError   the architecture fails a load-time check
    ├── RequestError                the client must change the request (HTTP 4xx)
    │   ├── InvalidRequestError     a field is missing, malformed or out of bounds
    │   │   └── AdapterFileError    an adapter's or checkpoint's files cannot be used
    │   ├── GrammarError            its grammar cannot be followed further within the limits
    │   ├── ContextLengthError      prompt + max_tokens do not fit the context
    │   ├── UnknownModelError       `model` names nothing that is served
    │   ├── UnknownTrajectoryError  no such trajectory, or not any more
    │   ├── ConflictError           the state of what is named forbids it
    │   │   └── TrainingDisabledError  this server does not train
    │   └── OverloadedError         the queue is full; try again later
    ├── TrainingFailedError         a run without clients cannot go on: its tasks fail
    └── EngineError                 the server failed the request (HTTP 5xx)
        ├── StepFailedError         the forward that carried this row raised
        ├── QueueTimeoutError       the request waited too long for its turn
        ├── DeviceMemoryError       the device had no memory for the request
        ├── AbortedError            the operator ended the request
        ├── StorageError            a file could not be written
        ├── AdapterUnavailableError the adapter version's weights cannot be had any more
        ├── DeviceLostError         the device fails whatever it is given
        └── EngineDeadError         the device thread is gone, or is shutting down

Which status and wire code each gets is decided in one table, `server/errors.py`.
"""

from __future__ import annotations


class ParaLLMError(Exception):
    """Root of every error this project raises on purpose."""


class ConfigError(ParaLLMError):
    """The configuration cannot be used; the message names the key and the remedy."""


class ModelError(ParaLLMError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No such model directory, and no hub model of that id could be had."""


class UnsupportedModelError(ModelError):
    """The architecture is not one this engine can batch correctly."""


class RequestError(ParaLLMError):
    """The request cannot be served as it stands; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field is missing, malformed or out of bounds."""


class AdapterFileError(InvalidRequestError):
    """An adapter's or a checkpoint's files are malformed, unsafe, or of another model."""


class GrammarError(RequestError):
    """A text came where its grammar cannot be followed any further within the limits: simplify the grammar."""


class ContextLengthError(RequestError):
    """The prompt and what is to be generated do not fit the model's context."""


class UnknownModelError(RequestError):
    """`model` names nothing that this server serves."""


class ConflictError(RequestError):
    """The state of what is named forbids it; trying again unchanged will not help."""


class TrainingDisabledError(ConflictError):
    """This server does not train; it was started without --enable-rl-training."""


class UnknownTrajectoryError(RequestError):
    """No trajectory has that id, or it is forgotten by now."""


class OverloadedError(RequestError):
    """The bounded queue is full; `retry_after_s` is a hint in seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainingFailedError(ParaLLMError):
    """A run without clients cannot go on; the message says what became of its tasks."""


class EngineError(ParaLLMError):
    """The server failed a request that was well formed."""


class StepFailedError(EngineError):
    """The forward that carried this sequence raised; other requests are unaffected."""


class QueueTimeoutError(EngineError):
    """The request waited in the queue for longer than the server lets requests wait."""


class DeviceMemoryError(EngineError):
    """The device had no memory for this request, though nobody else's row held any that would be freed."""


class DeviceLostError(EngineError):
    """The device fails whatever it is given: the device thread ends."""


class AbortedError(EngineError):
    """The operator ended the request, or a whole batch of them, before its end."""


class AdapterUnavailableError(EngineError):
    """The weights of an adapter version cannot be had any more: its files are gone or changed."""


class StorageError(EngineError):
    """The disk refused a file; the message says which acknowledged work is untouched, and names no path."""


class EngineDeadError(EngineError):
    """The device thread has stopped and takes no more requests."""
