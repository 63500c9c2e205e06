"""Where the machine's power comes from, whether it saves energy, and how hot it is."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PowerReading:
    """`low_power`: Low Power Mode of macOS. `hot`: macOS asks programs to do less."""

    on_battery: bool = False
    low_power: bool = False
    hot: bool = False

    def reason_to_wait(self, train_on_battery: bool) -> str:
        """Why training should wait, for people; empty if it should not. Heat is a reason in any case: what training
        computes then slows down the requests beside it."""
        if self.on_battery and not train_on_battery:
            return "the machine runs on battery; connect the charger, or set --train-on-battery"
        if self.low_power and not train_on_battery:
            return "Low Power Mode is on; turn it off, or set --train-on-battery"
        return "the machine is too hot" if self.hot else ""


def read_power() -> PowerReading:
    """The reading of this machine. Raises OSError, ValueError or AttributeError: the system does not say."""
    return mac_power(*_ask_mac()) if sys.platform == "darwin" else linux_power(Path("/sys/class/power_supply"))


_UNLIMITED = -2.0
"""`kIOPSTimeRemainingUnlimited`: power comes from outside, or there is no battery."""
_SERIOUS = 2
"""`NSProcessInfoThermalStateSerious`; the only state above it is critical."""


def mac_power(seconds_left: float, low_power: bool, thermal_state: int) -> PowerReading:
    """What `_ask_mac` returns, as a reading."""
    return PowerReading(seconds_left != _UNLIMITED, low_power, thermal_state >= _SERIOUS)


def _ask_mac() -> tuple[float, bool, int]:
    """`IOPSGetTimeRemainingEstimate` of IOKit, and `lowPowerModeEnabled` and `thermalState` of NSProcessInfo."""
    frameworks = "/System/Library/Frameworks"
    estimate = ctypes.CDLL(f"{frameworks}/IOKit.framework/IOKit").IOPSGetTimeRemainingEstimate
    estimate.restype = ctypes.c_double
    ctypes.CDLL(f"{frameworks}/Foundation.framework/Foundation")
    objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
    objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p

    def send(receiver: int, message: bytes, answer: type[ctypes.c_void_p | ctypes.c_bool | ctypes.c_long]) -> int:
        call = ctypes.CFUNCTYPE(answer, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
        return int(call(receiver, objc.sel_registerName(message)))

    info = send(objc.objc_getClass(b"NSProcessInfo"), b"processInfo", ctypes.c_void_p)
    low = send(info, b"isLowPowerModeEnabled", ctypes.c_bool)
    return estimate(), bool(low), send(info, b"thermalState", ctypes.c_long)


def linux_power(folder: Path) -> PowerReading:
    """`folder`: of the kernel's power supplies. A machine without a battery of its own is never on battery."""
    supplies = list(folder.iterdir()) if folder.is_dir() else []
    if any(_value(supply, "online") == "1" for supply in supplies if _value(supply, "type") != "Battery"):
        return PowerReading()
    batteries = [supply for supply in supplies if _value(supply, "type") == "Battery"]
    own = [battery for battery in batteries if _value(battery, "scope") != "Device"]  # not that of a mouse
    return PowerReading(on_battery=any(_value(battery, "status") == "Discharging" for battery in own))


def _value(supply: Path, name: str) -> str:
    file = supply / name
    return file.read_text().strip() if file.exists() else ""
