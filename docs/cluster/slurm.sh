#!/bin/bash
# A study as a Slurm array, one shard a task: STUDY=fig7 sbatch docs/cluster/slurm.sh
# After the last task: bench study fig7 --collect
#SBATCH --job-name=bench
#SBATCH --array=1-16
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem-per-cpu=2G
#SBATCH --time=02:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120

# Slurm ends the script 120 s before its time is over. Exit code 143 says: finished runs are kept, run it again.
shard="$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
${BENCH:-bench} study "${STUDY:-fig7}" --shard "$shard" --workers "${SLURM_CPUS_PER_TASK:-1}" ${OUT:+-o "$OUT"} &
trap 'kill -TERM $!' TERM
wait $!
code=$?
trap - TERM
wait $! && code=0 || code=$?
if [ "$code" -eq 143 ] && [ -n "$SLURM_JOB_ID" ]; then scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi
exit "$code"
