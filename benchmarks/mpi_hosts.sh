#!/usr/bin/env bash
# Train across two hosts that are not there: two network namespaces of this machine, joined by a virtual cable.
#
#     host A 10.77.0.1  ==== veth ====  host B 10.77.0.2
#     ranks 0 and 1                     ranks 2 and 3
#
# Neither side has any other network, so whatever ranks of A and B say to each other goes through the cable, whose
# counters are shown: replicas are on different sides, so at least the bytes of dp, and results. MPI is kept to TCP, as
# on real hosts, since it would find the memory that these two share. In the place of ssh, which mpiexec would use to
# start ranks on the other host, stands a script that enters its namespace.
#
#     sudo benchmarks/mpi_hosts.sh [PYTHON]        # writes benchmarks/results/mpi_hosts.txt
#
# Needs root (for namespaces), iproute2, and a Python that has refpar[mpi].
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${1:-python3}")
mpiexec=$(dirname "$python")/mpiexec
[ -x "$mpiexec" ] || mpiexec=$(command -v mpiexec)
results=benchmarks/results/mpi_hosts.txt
a=refpar-a-$$ b=refpar-b-$$
here=$(mktemp -d)

cleanup() {
    ip netns delete "$a" 2>/dev/null || true
    ip netns delete "$b" 2>/dev/null || true
    rm -rf "$here"
}
trap cleanup EXIT

ip netns add "$a"
ip netns add "$b"
ip link add cable netns "$a" type veth peer name cable netns "$b"
for host in "$a 10.77.0.1" "$b 10.77.0.2"; do
    set -- $host
    ip -n "$1" address add "$2/24" dev cable
    ip -n "$1" link set lo up
    ip -n "$1" link set cable up
done

# mpiexec calls it as it would ssh: options, the host, the command.
cat > "$here/enter" <<EOF
#!/usr/bin/env bash
while [ "\${1#-}" != "\$1" ]; do shift; done
case "\$1" in 10.77.0.1) host=$a ;; 10.77.0.2) host=$b ;; *) echo "no host \$1" >&2; exit 1 ;; esac
shift
exec ip netns exec "\$host" bash -c "\$*"
EOF
chmod +x "$here/enter"

across() {
    timeout 300 ip netns exec "$a" "$mpiexec" -launcher ssh -launcher-exec "$here/enter" \
        -genv UCX_TLS tcp,self -hosts 10.77.0.1:2,10.77.0.2:2 -n 4 "$@"
}

through_the_cable() {
    ip -n "$a" -s -json link show cable |
        "$python" -c 'import json, sys; s = json.load(sys.stdin)[0]["stats64"]; print(s["tx"]["bytes"] + s["rx"]["bytes"])'
}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
layout="--dp 2 --tp 2 --zero 1 --micro-batches 2 --steps 20"
{
    echo "Two hosts, two ranks each; $("$python" -c 'import mpi4py, refpar; print("refpar", refpar.__version__, "mpi4py", mpi4py.__version__)'); $("$mpiexec" --version | sed -n 's/ *Version: */MPICH /p')"
    across sh -c 'echo "rank $PMI_RANK of $PMI_SIZE is on $(hostname -I)"' | sort
    before=$(through_the_cable)
    echo
    echo "\$ mpiexec -genv UCX_TLS tcp,self -hosts 10.77.0.1:2,10.77.0.2:2 -n 4 python -m mpi4py -m refpar train --transport mpi $layout"
    across "$python" -m mpi4py -m refpar train --transport mpi $layout --data LICENSE --save "$here/across"
    echo "through the cable: $(($(through_the_cable) - before)) bytes, both ways"
    echo
    echo "\$ refpar train $layout      # on processes of one host"
    "$python" -m refpar train $layout --data LICENSE --save "$here/alone" | tail -n 4
    "$python" - "$here/across" "$here/alone" <<'EOF'
import sys
from refpar import state
one, other = (state.load(path) for path in sys.argv[1:])
same = all((one.parameters[n] == x).all() for n, x in other.parameters.items())
same &= all((one.state[n][b] == x).all() for n, own in other.state.items() for b, x in own.items())
print("weights, moments and masters:", "the same, bit for bit" if same else "DIFFERENT")
EOF
} 2>&1 | sed "s#$here/##g" | tee "$here/out"
grep -q "bit for bit" "$here/out"
cp "$here/out" "$results"
