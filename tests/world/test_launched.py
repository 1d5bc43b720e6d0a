"""Numbers of processes and nodes in the variables of launchers."""

import pytest

from lightning_ptdp.world.rendezvous_address import launched_processes


@pytest.mark.parametrize(
    ("variables", "sizes"),
    [
        ({}, None),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, (4, 2)),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, (1, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 3)),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, (2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}, (8, 2)),
        # Lightning's own processes, a shell in an allocation, a batch script
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, None),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}, None),
        # uneven nodes
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, None),
        ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "2"}, None),
        ({"WORLD_SIZE": "two", "LOCAL_WORLD_SIZE": "2"}, None),
    ],
)
def test_sizes_in_variables(variables, sizes):
    assert launched_processes(variables) == sizes
