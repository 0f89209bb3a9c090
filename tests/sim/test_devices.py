"""Names, capabilities and a device without float64, on the simulated accelerator. Each scenario is played in a process of its own."""

from __future__ import annotations

from scenario import play, scenarios


@scenarios("devices")
def test_a_device_that_torch_did_not_know(scenario: str) -> None:
    play("devices", scenario)
