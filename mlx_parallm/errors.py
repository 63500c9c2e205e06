"""The exception tree. The message of an error that users can see says what to change.

    ParaLLMError
    ├── ConfigError                 a flag, a key or a combination of keys is wrong
    ├── ModelError
    │   ├── ModelNotFoundError      there is no such directory or hub id
    │   └── UnsupportedModelError   the architecture fails a load-time check
    ├── RequestError                the client must change the request (HTTP 4xx)
    │   ├── InvalidRequestError     a field is missing, malformed or out of bounds
    │   │   ├── AdapterFileError    the files of an adapter or a checkpoint cannot be used
    │   │   └── AdapterTooLargeError  the device has no memory for an adapter's factors
    │   ├── GrammarError            its grammar cannot be followed any further within the limits
    │   ├── ContextLengthError      prompt + max_tokens do not fit the context
    │   ├── RoleError               the key's role may not do that
    │   ├── UnknownModelError       `model` is not the name of anything that is served
    │   ├── UnknownTrajectoryError  there is no such trajectory, or no longer
    │   ├── ConflictError           the present state does not allow the request
    │   │   └── TrainingDisabledError  the server does not train
    │   └── OverloadedError         the queue is full; try again later
    ├── TrainingFailedError         a training run without clients cannot continue, because its tasks fail
    └── EngineError                 the server failed the request (HTTP 5xx)
        ├── StepFailedError         the forward that carried this row raised
        ├── QueueTimeoutError       the request waited too long in the queue
        ├── DeviceMemoryError       the device has no memory for the request
        ├── AbortedError            the operator aborted the request
        ├── StorageError            a file cannot be written
        ├── QueueFullError          the trajectories that wait for training leave no room
        ├── ModelUnavailableError   the base model cannot be loaded
        ├── AdapterUnavailableError the weights of the adapter version are gone
        ├── NodeFailedError         another node of the cluster could not answer the request to its end
        ├── DeviceLostError         every call to the device fails
        └── EngineDeadError         the device thread has stopped or is shutting down
            ├── DeviceHungError     the device thread does not come back from a call
            └── RankLostError       another rank of a model over several machines is gone; also a DeviceLostError

The table in `server/errors.py` assigns an HTTP status and an error code to each.
"""

from __future__ import annotations

from collections.abc import Sequence


class ParaLLMError(Exception):
    """Base class of all errors that this project raises on purpose."""


class ConfigError(ParaLLMError):
    """The configuration cannot be used. The message names the key and the remedy."""


class ModelError(ParaLLMError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """There is no such model directory, and no hub model with that id could be downloaded."""


class UnsupportedModelError(ModelError):
    """The architecture is not one this engine can batch correctly."""


class RequestError(ParaLLMError):
    """The request cannot be served as it is. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field is missing, malformed or out of bounds."""


class AdapterFileError(InvalidRequestError):
    """The files of an adapter or a checkpoint are malformed, unsafe, or made for another model."""


class AdapterTooLargeError(InvalidRequestError):
    """The factors of an adapter need more memory than there is for adapters. The message has both sizes."""


class GrammarError(RequestError):
    """The grammar cannot be followed any further within the limits on its work. A simpler grammar may help."""


class ContextLengthError(RequestError):
    """The prompt and the tokens to generate do not fit into the model's context."""


class RoleError(RequestError):
    """The key's role may not do that."""

    @classmethod
    def needing(cls, needed: str, role: str, what: str = "This", param: str | None = None) -> RoleError:
        """The error about `what`, which needs a key with the role `needed`."""
        return cls(f"{what} needs a key with the role {needed}; the role of this key is {role}.", param=param)


class UnknownModelError(RequestError):
    """`model` is not the name of anything that this server serves."""

    @classmethod
    def listing(cls, selector: str, names: Sequence[str]) -> UnknownModelError:
        """The error about a selector that is none of `names`. It lists the first of them, in text of bounded length."""
        listed = ", ".join(name[:80] for name in names[:10]) + (f" and {len(names) - 10} more" if names[10:] else "")
        return cls(f"No model or adapter is called {selector[:100]!r}; there are {listed}: see GET /v1/models.")


class ConflictError(RequestError):
    """The present state does not allow the request. Trying again without a change will not help."""


class TrainingDisabledError(ConflictError):
    """This server does not train, because it was started without --enable-rl-training."""


class UnknownTrajectoryError(RequestError):
    """No trajectory has that id, or it was dropped."""


class OverloadedError(RequestError):
    """The queue is full. `retry_after_s` is a hint for the client, in seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainingFailedError(ParaLLMError):
    """A training run without clients cannot continue. The message says what happened to its tasks."""


class EngineError(ParaLLMError):
    """The server failed a well-formed request."""


class StepFailedError(EngineError):
    """The forward of the step with this sequence raised. Sequences of other steps are unaffected."""


class QueueTimeoutError(EngineError):
    """The request waited in the queue for longer than the server allows."""


class DeviceMemoryError(EngineError):
    """The device has no memory for this request, and no other row holds memory that will be freed."""


class NodeFailedError(EngineError):
    """Another node of the cluster refused a request, or was lost before its answer was complete."""


class DeviceLostError(EngineError):
    """Every call to the device fails, so the device thread ends."""


class AbortedError(EngineError):
    """The operator aborted the request, alone or with others, before it finished."""


class ModelUnavailableError(EngineError):
    """The base model cannot be loaded now. The message says why, and names no path."""


class AdapterUnavailableError(EngineError):
    """The weights of an adapter version cannot be loaded again, because its files are gone or have changed."""


class StorageError(EngineError):
    """A file cannot be written or removed. The message says which finished work is unaffected, and names no path."""


class QueueFullError(EngineError):
    """The trajectories that wait for training leave no room for more."""


class EngineDeadError(EngineError):
    """The device thread has stopped and accepts no more requests."""


class DeviceHungError(EngineDeadError):
    """The device thread does not come back from a call. The message says what it was doing, and for how long."""


class RankLostError(DeviceLostError, EngineDeadError):
    """Another rank of a model over several machines is gone. The message says which, and names no path."""


MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading fields of JSON from a file raises if the file may hold anything: no JSON, other types, missing names,
numbers that are too large, values that are nested too deeply."""

_SHOWN_CHARACTERS = 160


def shown(text: str) -> str:
    """The text as quoted ASCII of limited length, safe to put in a message."""
    return ascii(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...")
