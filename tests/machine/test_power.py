"""Where power comes from, and when training waits for it."""

import pytest

from mlx_parallm.machine.power import PowerReading, linux_power, mac_power, read_power

BATTERY, MAINS, SAVING, HOT = PowerReading(True), PowerReading(), PowerReading(low_power=True), PowerReading(hot=True)


@pytest.mark.parametrize(
    ("seconds_left", "low_power", "thermal_state", "expected"),
    [
        (-2.0, False, 0, MAINS),  # kIOPSTimeRemainingUnlimited: the charger, or no battery
        (-1.0, False, 1, BATTERY),  # kIOPSTimeRemainingUnknown: just unplugged
        (3600.0, False, 0, BATTERY),
        (-2.0, True, 0, SAVING),
        (-2.0, False, 2, HOT),
        (-2.0, False, 3, HOT),
    ],
)
def test_what_macos_says(seconds_left, low_power, thermal_state, expected):
    assert mac_power(seconds_left, low_power, thermal_state) == expected


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({}, MAINS),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, BATTERY),
        ({"BAT0": {"type": "Battery", "status": "Discharging", "scope": "System"}}, BATTERY),
        ({"BAT0": {"type": "Battery", "status": "Full"}}, MAINS),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, MAINS),
        (
            {"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "1"}},
            MAINS,
        ),
        (
            {"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "0"}},
            BATTERY,
        ),
    ],
)
def test_what_linux_says(tmp_path, supplies, expected):
    for supply, files in supplies.items():
        (tmp_path / supply).mkdir()
        for name, text in files.items():
            (tmp_path / supply / name).write_text(text + "\n")
    assert linux_power(tmp_path) == expected
    assert linux_power(tmp_path / "none") == MAINS


@pytest.mark.parametrize(
    ("reading", "waits", "waits_if_asked_for"),
    [(MAINS, False, False), (BATTERY, True, False), (SAVING, True, False), (HOT, True, True)],
)
def test_when_training_waits(reading, waits, waits_if_asked_for):
    assert bool(reading.reason_to_wait(train_on_battery=False)) is waits
    assert bool(reading.reason_to_wait(train_on_battery=True)) is waits_if_asked_for


def test_this_machine_has_a_reading():
    assert isinstance(read_power(), PowerReading)
