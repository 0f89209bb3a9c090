import pytest

from engine.distributed.environment import Environment, detect

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_variables_the_process_is_alone():
    assert detect({}) == Environment("single", 0, 1, 0, 1, 1, None, None)


@pytest.mark.parametrize("leftover", [{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, {"RANK": "", "WORLD_SIZE": ""}])
def test_leftovers_that_name_no_rank_are_no_job(leftover):
    assert detect(leftover).name == "single"


def test_torchrun():
    assert detect(FULL) == Environment("torchrun", 3, 4, 1, 2, 2, "10.0.0.1", 29500)


def test_torchrun_with_an_agent_that_serves_the_store():
    more = {
        "GROUP_WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/e",
    }
    found = detect(FULL | more)
    assert (found.num_nodes, found.agent_store, found.restart_count, found.error_file) == (3, True, 2, "/e")


def test_relaunched_rank_knows_its_parent():
    found = detect(FULL | {"FIT_PARENT_PID": "77"})
    assert (found.name, found.parent_pid) == ("relaunch", 77)


@pytest.mark.parametrize("missing", sorted(FULL))
def test_partial_set_is_an_error_that_shows_what_was_read(missing):
    with pytest.raises(RuntimeError, match=f"{missing} is not set") as caught:
        detect({name: value for name, value in FULL.items() if name != missing})
    shown = str(caught.value).split("Read: ")[1]
    assert all((f"{name}={value!r}" in shown) == (name != missing) for name, value in FULL.items())
    assert "torchrun" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"RANK": "4"}, "RANK must be less than WORLD_SIZE"),
        ({"RANK": "-1"}, "RANK must be at least 0"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK must be less than LOCAL_WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must not exceed WORLD_SIZE"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must not exceed 65535"),
        ({"FIT_PARENT_PID": "me"}, "FIT_PARENT_PID must be a whole number"),
    ],
)
def test_contradictions_are_errors(changed, reason):
    with pytest.raises(RuntimeError, match=reason):
        detect(FULL | changed)
