#!/usr/bin/env bash
# The plain loop on the hosts of a hostfile, over Open MPI. No change to the script: mpirun says who is who.
#
#     examples/mpirun.sh hosts 8
#
# `hosts` has a line a host, such as `node1 slots=4`: as many ranks as it has slots. Every host needs the same Python
# environment and script in the same places, and ssh without a password from this one. More ranks than slots are an error
# of mpirun's unless OVERSUBSCRIBE=1 says that it is meant. Further settings are Open MPI's own variables:
#
#     OMPI_MCA_btl_tcp_if_include=eth0                          the link that gradients take, where hosts have several
#     PRTE_MCA_plm_ssh_args="-o StrictHostKeyChecking=no"       what ssh is given, where containers have new keys
set -euo pipefail
hostfile=${1:?give a hostfile, such as one with the line "localhost slots=2"}
ranks=${2:?give the number of ranks}
options=(--hostfile "$hostfile" -n "$ranks")
# What ssh starts elsewhere has not this shell's PATH.
python=$(command -v "${PYTHON:-python}")
examples=$(cd "$(dirname "$0")" && pwd)
# Threads of all ranks on a host share its cores: one each, unless you say otherwise.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# In a container one is often root, and has fewer cores than ranks: Open MPI wants to be told that both are meant.
if [[ $EUID == 0 ]]; then options+=(--allow-run-as-root); fi
if [[ ${OVERSUBSCRIBE:-} ]]; then options+=(--map-by ":OVERSUBSCRIBE"); fi
exec mpirun "${options[@]}" -x OMP_NUM_THREADS "$python" "$examples/plain_loop.py" "${@:3}"
