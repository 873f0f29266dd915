# One run on a Slurm cluster: settings of coordinator.sbatch and worker.sbatch, which both source this
# file. Submit them from this directory: Slurm starts a job where it was submitted.

# The environment, on a file system that every node sees: modules, a virtual environment, or both.
#module load python/3.11 cuda
. "${SAMESTEP_VENV:-/shared/samestep/.venv}/bin/activate"

RUN_SPEC=run.yaml    # the run spec
EXPECT_WORKERS=4     # the run starts once this many workers are ready, and more may join later; a
                     # worker with several devices counts as that many

# All nodes must share this directory. It gets: run/ (logs, checkpoints, result), keys/ (the join
# token and the workers' keys, readable by you alone) and address.json (where the coordinator is now).
export SAMESTEP_HOME=$PWD/keys
export SAMESTEP_ADDRESS_FILE=$PWD/address.json
# A worker waits this many seconds for a coordinator that is queued, or requeued, before it gives up.
export SAMESTEP_RETRY_FOR=86400
