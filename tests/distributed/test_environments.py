"""Each launcher's variables as it sets them (recorded from the programs where they run on one machine), and every contradiction."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import pytest
from support.ranks import clean_environment

from engine.distributed.environments import DETECTORS, Environment, detect, hints

FULL = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
# mpirun (Open MPI) 4.1.4, the second of two processes.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1432420353",
    "PMIX_RANK": "1",
}
# Hydra 4.0.2
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
# srun -N 2 -n 3 of SLURM 22.05.8, the task on the second node.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",
}
# The batch script of the same job: no step.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "3",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2,1",
}
PET = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
# A worker of a PyTorchJob without elastic policy.
POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_without_variables_the_process_is_alone():
    assert detect({}) == Environment("single", 0, 1, 0, 1, 1, None, None)


def test_few_variables_are_read_where_no_launcher_has_set_any():
    """Each evaluation detects its environment, and ``os.environ`` takes nearly a microsecond for a variable."""
    asked = []

    class Environ(dict[str, str]):
        def __contains__(self, name):
            asked.append(name)
            return super().__contains__(name)

        def get(self, name, default=None):
            asked.append(name)
            return super().get(name, default)

    assert detect(Environ()) == Environment("single")
    assert len(asked) < 15


@pytest.mark.parametrize(
    "leftover",
    [{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, {"RANK": "", "WORLD_SIZE": ""}, {"PET_NPROC_PER_NODE": "4"}],
)
def test_leftovers_that_name_no_rank_are_no_job(leftover):
    assert detect(leftover).name == "single"


# -- torchrun, and variables set by hand ----------------------------------------------------------------------------------------------


def test_torchrun():
    assert detect(FULL) == Environment("torchrun", 3, 4, 1, 2, 2, "10.0.0.1", 29500)


def test_what_was_read_is_kept():
    assert detect(FULL | {"HOME": "/"}).variables == FULL


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


def test_deepspeeds_launcher_has_another_name_for_the_local_size():
    more = {"LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
    assert detect(without(FULL, "LOCAL_WORLD_SIZE") | more) == Environment(
        "deepspeed", 3, 4, 1, 2, 2, "10.0.0.1", 29500
    )


def test_ray_train():
    found = detect(FULL | {"NODE_RANK": "1", "RAY_JOB_ID": "01000000"})
    assert found == Environment("ray", 3, 4, 1, 2, 2, "10.0.0.1", 29500, binds_devices=True)


@pytest.mark.parametrize("missing", sorted(FULL))
def test_partial_set_is_an_error_that_shows_what_was_read(missing):
    with pytest.raises(RuntimeError, match=f"{missing} is not set") as caught:
        detect(without(FULL, missing))
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
        ({"GROUP_WORLD_SIZE": "5"}, "5 nodes cannot share 4 process"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must not exceed 65535"),
        ({"FIT_PARENT_PID": "me"}, "FIT_PARENT_PID must be a whole number"),
    ],
)
def test_contradictions_are_errors(changed, reason):
    with pytest.raises(RuntimeError, match=reason):
        detect(FULL | changed)


def test_set_by_hand_on_one_machine():
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert detect(by_hand) == Environment("manual", 1, 2, 1, 2, 1, "127.0.0.1", 29500, binds_devices=True)
    assert detect(by_hand | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}).world_size == 1


def test_set_by_hand_for_several_machines_needs_the_local_ones():
    with pytest.raises(
        RuntimeError, match=r"LOCAL_RANK, LOCAL_WORLD_SIZE are not set.*unknown which.*MASTER_ADDR='10.0.0.1'"
    ):
        detect(without(FULL, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


# -- MPI ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variables"), [("openmpi", OPEN_MPI), ("mpich", MPICH), ("mvapich", MVAPICH)])
def test_mpi_on_one_machine(name, variables):
    found = detect(variables)
    assert found == Environment(name, 1, 2, 1, 2, 1, "127.0.0.1", found.master_port, binds_devices=True)
    assert 10000 <= found.master_port < 30000
    first = {key: "0" if key.endswith(("RANK", "RANKID")) else value for key, value in variables.items()}
    assert detect(first).rank == 0
    assert detect(first).master_port == found.master_port
    assert detect(variables | {"MASTER_PORT": "1234"}).master_port == 1234


def test_two_jobs_of_open_mpi_meet_at_different_ports():
    assert detect(OPEN_MPI).master_port != detect(OPEN_MPI | {"PMIX_NAMESPACE": "1432420354"}).master_port


TWO_MACHINES = {"OMPI_COMM_WORLD_SIZE": "5", "OMPI_MCA_orte_num_nodes": "3"}


def test_mpi_on_several_machines_needs_an_address():
    with pytest.raises(
        RuntimeError, match=r"2 of 5 processes are here\), and MASTER_ADDR is not set.*mpirun -x MASTER_ADDR=HOST"
    ):
        detect(OPEN_MPI | TWO_MACHINES)
    found = detect(OPEN_MPI | TWO_MACHINES | {"MASTER_ADDR": "a"})
    assert (found.master_addr, found.num_nodes, found.local_world_size) == ("a", 3, 2)
    with pytest.raises(RuntimeError, match=r"MASTER_PORT is not set.*mpirun -genv MASTER_PORT 29500"):
        detect(MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "a"})
    assert detect(MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}).num_nodes == 2


@pytest.mark.parametrize(
    "missing", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"]
)
def test_half_of_mpis_variables_is_an_error(missing):
    with pytest.raises(RuntimeError, match=f"{missing} is not set. Read: OMPI_COMM_WORLD_RANK='1'"):
        detect(without(OPEN_MPI, missing))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK must be less than OMPI_COMM_WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK must be less than"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "OMPI_COMM_WORLD_LOCAL_SIZE must not exceed OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_contradictions_of_mpi(changed, reason):
    with pytest.raises(RuntimeError, match=reason):
        detect(OPEN_MPI | changed)


# -- SLURM ----------------------------------------------------------------------------------------------------------------------------


def test_slurm():
    found = detect(SLURM)
    assert found == Environment("slurm", 2, 3, 0, 1, 2, "node07", found.master_port, binds_devices=True)
    first = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_GTIDS": "0,1"}
    assert detect(SLURM | first) == Environment("slurm", 1, 3, 1, 2, 2, "node07", found.master_port, binds_devices=True)
    assert detect(SLURM | {"SLURM_STEP_ID": "1"}).master_port != found.master_port
    assert detect(SLURM | {"SLURM_RESTART_COUNT": "3"}).restart_count == 3


def test_slurm_with_an_address_of_the_users_own():
    found = detect(SLURM | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000", "WORLD_SIZE": "3"})
    assert (found.master_addr, found.master_port) == ("10.1.1.1", 4000)


def test_slurms_step_on_one_node_needs_no_names():
    one = {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_LOCALID": "2",
        "SLURM_GTIDS": "0,1,2",
        "SLURM_STEP_TASKS_PER_NODE": "3",
    }
    found = detect(SLURM | one)
    assert (found.local_rank, found.local_world_size, found.master_addr) == (2, 3, "127.0.0.1")


@pytest.mark.parametrize(
    "variables",
    [
        without(SLURM, "SLURM_STEP_ID", "SLURM_PROCID"),  # a shell of salloc
        BATCH,
        SLURM | {"SLURM_STEP_ID": "4294967290"},  # LaunchParameters=use_interactive_step
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SLURM
        | {
            "SLURM_PROCID": "0",
            "SLURM_NODEID": "0",
            "SLURM_GTIDS": "0",
        },  # a batch script that was submitted from within a step
    ],
)
def test_under_slurm_but_not_a_task(variables):
    found = detect(variables)
    assert found == Environment("single")
    assert any("inside SLURM job 7, but a single process" in hint for hint in hints(variables, found))


def test_a_shell_of_srun_pty_is_told_by_its_terminal():
    code = (
        "import os, sys\n"
        "from engine.distributed.environments import detect\n"
        "if sys.argv[1] == 'shell' and (pid := os.forkpty()[0]): sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "os._exit({'slurm': 10, 'single': 20}[detect(os.environ).name])"
    )
    environ = clean_environment(**SLURM, SLURM_PTY_PORT="35227")
    for where, expected in (("shell", 20), ("step", 10)):  # a step that is started from such a shell has no terminal
        done = subprocess.run(
            [sys.executable, "-c", code, where], env=environ, start_new_session=True, timeout=300, check=False
        )
        assert done.returncode == expected


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"SLURM_PROCID": "3", "SLURM_GTIDS": "3"}, "SLURM_PROCID must be less than SLURM_STEP_NUM_TASKS"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID must be less than SLURM_STEP_NUM_NODES"),
        ({"SLURM_LOCALID": "1"}, r"SLURM_LOCALID must be less than the 1 task\(s\) of this node"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, r"'1\(x2\)' means 2 tasks on 2 nodes, where there are 3 on 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "'2;1' is not a list of counts"),
        ({"SLURM_STEP_NODELIST": "node[1"}, "is not a list of nodes.*or set MASTER_ADDR"),
        ({"SLURM_STEP_NODELIST": ""}, "neither SLURM_STEP_NODELIST nor MASTER_ADDR is set"),
    ],
)
def test_contradictions_of_slurm(changed, reason):
    with pytest.raises(RuntimeError, match=reason) as caught:
        detect(SLURM | changed)
    assert "SLURM_JOB_ID='7'" in str(caught.value)
    assert "srun" in str(caught.value)


HOSTILE = [
    "-1",
    "9" * 5000,
    "²",
    "2147483648",
    "abc",
    "\x1b[2J\nforged",
    "n[0-99999999]",
    "n[0-9999][0-9999]",
    "1(x9999999999)",
    "," * 100_000,
]


def test_no_value_of_a_variable_takes_time_or_reaches_the_terminal_as_it_is():
    """Each variable of each launcher has each value in turn: it describes a job, or is an error in a few words."""
    began = time.process_time()
    errors: list[str] = []
    for variables in (FULL, OPEN_MPI, MPICH, SLURM, PET, POD):
        for name, value in itertools.product(variables, HOSTILE):
            try:
                detect({**variables, name: value})
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
    assert errors
    assert [text for text in errors if "limit" in text] == []  # Python's own error about digits
    assert [text for text in errors if not text.isprintable() or len(text) > 5000] == []
    assert time.process_time() - began < 10


def test_half_set_by_hand_in_a_batch_script_is_told_of_srun():
    with pytest.raises(RuntimeError, match=r"RANK is not set.*SLURM job 7, but the process was not started by srun"):
        detect(BATCH | {"WORLD_SIZE": "3", "MASTER_ADDR": "node07", "MASTER_PORT": "4000"})


# -- Kubernetes -----------------------------------------------------------------------------------------------------------------------


def test_a_pod_of_the_trainer_is_a_rank():
    assert detect(PET) == Environment("kubernetes", 2, 3, 0, 1, 3, "job-node-0-0.job", 29400)
    # PyTorchJob sets both, with one meaning.
    by_operator = PET | {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29400",
        "PET_NPROC_PER_NODE": "auto",
    }
    assert detect(by_operator) == detect(PET)


def test_a_pod_of_the_operator_is_a_rank():
    assert detect(POD) == Environment("kubernetes", 1, 3, 0, 1, 3, "job-master-0", 23456)
    assert detect(POD | {"RANK": "0", "MASTER_ADDR": "localhost"}) == Environment(
        "kubernetes", 0, 3, 0, 1, 3, "localhost", 23456
    )


def test_two_processes_that_are_tried_in_one_pod():
    assert detect(POD | {"MASTER_ADDR": "localhost"}) == Environment(
        "manual", 1, 3, 1, 3, 1, "localhost", 23456, binds_devices=True
    )


@pytest.mark.parametrize("processes", ["1", "auto"])
def test_the_only_pod_starts_its_processes_itself(processes):
    variables = PET | {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": processes}
    assert detect(variables) == Environment("single")
    assert "the only pod of its job" in hints(variables, detect(variables))[0]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"PET_NPROC_PER_NODE": "4"},
            r"several processes \(PET_NPROC_PER_NODE=4\), but nothing has started them.*torchrun script.py",
        ),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto"),
        ({"PET_NPROC_PER_NODE": "4", "PET_NNODES": "1"}, "nothing has started them"),
        ({"PET_NNODES": "1:4"}, r"may change \(1:4\), which needs a launcher in each pod"),
        ({"PET_NNODES": "many"}, "PET_NNODES must be a number"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK must be less than PET_NNODES"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({"PET_NPROC_PER_NODE": "2", "RANK": "2", "WORLD_SIZE": "6"}, "nothing has started them"),
        ({"RANK": "1"}, "RANK is not 2, as PET_NODE_RANK says"),
    ],
)
def test_contradictions_of_pods(changed, reason):
    with pytest.raises(RuntimeError, match=reason) as caught:
        detect(PET | changed)
    assert "PET_NODE_RANK=" in str(caught.value)


def test_torchrun_in_a_pod_wins():
    assert detect(FULL | PET | {"PET_NPROC_PER_NODE": "2"}).name == "torchrun"


# -- several at once ------------------------------------------------------------------------------------------------------------------

AGENT = FULL | {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "name", "rank"),
    [
        (AGENT | OPEN_MPI, "torchrun", 3),
        (AGENT | SLURM, "torchrun", 3),
        (FULL | OPEN_MPI, "torchrun", 3),  # more ranks than processes of mpirun: each of them has started some
        (OPEN_MPI | SLURM | {"SLURM_PROCID": "0"}, "openmpi", 1),  # mpirun starts its daemons with srun
        (MPICH | SLURM | {"SLURM_PROCID": "0"}, "mpich", 1),
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "7.0"}, "slurm", 2),  # srun --mpi=pmi2
        (MVAPICH | MPICH, "mvapich", 1),
        (OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "2"}, "openmpi", 1),  # told twice
        (PET | SLURM, "slurm", 2),
    ],
)
def test_who_wins(variables, name, rank):
    found = detect(variables)
    assert (found.name, found.rank) == (name, rank)


def test_the_winner_is_told():
    assert hints(AGENT | OPEN_MPI, detect(AGENT | OPEN_MPI)) == [
        "torchrun's variables win over OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE, "
        "OMPI_MCA_orte_num_nodes, PMIX_NAMESPACE"
    ]
    assert hints({"MASTER_ADDR": "a"}, detect({"MASTER_ADDR": "a"})) == [
        "MASTER_ADDR or MASTER_PORT is set, but no rank: they are not used"
    ]
    assert hints(FULL, detect(FULL)) == hints({}, detect({})) == []


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        (
            OPEN_MPI | {"RANK": "0"},
            r"openmpi has started this process as rank 1 of 2 .*but RANK is '0'.*OMPI_COMM_WORLD_RANK='1'.*RANK='0'",
        ),
        (OPEN_MPI | {"WORLD_SIZE": "4"}, "WORLD_SIZE is '4'"),
        (
            SLURM | {"LOCAL_RANK": "1"},
            "slurm has started this process as rank 2 of 3.*LOCAL_RANK is '1'.*Unset LOCAL_RANK",
        ),
        (
            FULL | OPEN_MPI | {"WORLD_SIZE": "2", "RANK": "0"},
            "openmpi has started this process as rank 1 of 2.*RANK is 0 and WORLD_SIZE is 2",
        ),
        (FULL | SLURM | {"WORLD_SIZE": "2", "RANK": "1"}, "slurm has started this process as rank 2 of 3"),
    ],
)
def test_two_launchers_that_contradict_each_other(variables, reason):
    with pytest.raises(RuntimeError, match=reason):
        detect(variables)


def test_each_launcher_lists_the_variables_it_reads():
    for detector in DETECTORS:
        assert len(set(detector.names)) == len(detector.names) > 3


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2 must be at least 0 and less than world_size=2"),
        ({"world_size": 0}, "world_size=0 must be at least 1"),
        ({"local_rank": 1, "world_size": 2}, "local_rank=1 must be at least 0 and less than local_world_size=1"),
        ({"local_world_size": 3, "world_size": 2}, "local_world_size=3 must not exceed world_size=2"),
        ({"num_nodes": 3, "world_size": 2}, "num_nodes=3 must be at least 1 and at most world_size=2"),
        ({"master_port": 70000}, "master_port=70000"),
    ],
)
def test_an_environment_of_the_users_own_is_checked(numbers, reason):
    with pytest.raises(ValueError, match=reason):
        Environment("mine", **numbers)
