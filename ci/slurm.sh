#!/usr/bin/env bash
# Jobs on a SLURM cluster of two virtual nodes on this machine: ci/slurm.sh [FOLDER]. Needs root, slurm-wlm, munge and iproute2.
# All daemons run in namespaces of their own (processes, network, mounts, host name) and end with this script.
set -euo pipefail
limit=${SLURM_CI_LIMIT:-3600}
folder="$(realpath "${1:-$(mktemp -d)}")"

for command in slurmctld slurmd munged ip unshare; do
    if ! PATH="$PATH:/usr/sbin" command -v "$command" > /dev/null; then
        echo "skipped: there is no $command on this machine (apt-get install slurm-wlm munge iproute2)"
        exit 0
    fi
done
if ! unshare --mount --net --pid --fork --uts true 2> /dev/null; then
    echo "skipped: namespaces cannot be made here; run this as root"
    exit 0
fi

if [ -z "${SLURM_CI_INSIDE:-}" ]; then
    export SLURM_CI_INSIDE=1 PATH="$PATH:/usr/sbin"
    exec timeout --kill-after=10 "$limit" \
        unshare --mount --net --pid --fork --kill-child --mount-proc --uts --propagation private "$0" "$folder"
fi

mount -t tmpfs tmpfs /run
mkdir -p /run/munge /run/netns "$folder/state" "$folder/spool-n0" "$folder/spool-n1"
head -c 128 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
printf '127.0.0.1 localhost\n10.77.0.254 control\n10.77.0.1 n0\n10.77.0.2 n1\n' > "$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
hostname control

cat > "$folder/slurm.conf" << END
ClusterName=ci
SlurmctldHost=control(10.77.0.254)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
ReturnToService=2
NodeName=n[0-1] NodeAddr=10.77.0.[1-2] CPUs=4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
echo 'CgroupPlugin=cgroup/v1' > "$folder/cgroup.conf"
export SLURM_CONF="$folder/slurm.conf"

ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.77.0.254/24 dev bridge0
ip link set bridge0 up
for node in 0 1; do
    ip netns add "n$node"
    ip link add "port$node" type veth peer name eth0 netns "n$node"
    ip link set "port$node" master bridge0 up
    ip -n "n$node" addr add "10.77.0.$((node + 1))/24" dev eth0
    ip -n "n$node" link set eth0 up
    ip -n "n$node" link set lo up
done

munged --key-file="$folder/munge.key" --log-file="$folder/munged.log" --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" --force
slurmctld
cat > "$folder/start_node" << 'END'
#!/bin/bash
exec nsenter --net="/run/netns/$1" unshare --uts bash -c 'hostname "$0"; exec slurmd' "$1"
END
chmod +x "$folder/start_node"
"$folder/start_node" n0
"$folder/start_node" n1

python "$(dirname "$(realpath "$0")")/slurm_jobs.py" "$folder"
