# Runs schemathesis as an unprivileged user, and then as root, against a service. All are in a new PID namespace of which
# this shell is the init, so that no pid in a request names a process of the host, and nothing outlives the shell.
# Arguments: directory for the files, virtual environment with schemathesis, program of the service.
dir=$1 venv=$2 reaper=$3
as_user="setpriv --reuid 4242 --regid 4242 --clear-groups --no-new-privs --inh-caps=-all"

# The user may not be able to reach the original.
mkdir "$dir/venv" "$dir/agent"
mount --bind -o ro "$venv" "$dir/venv"

# The examples of the document have this pid. The built-in rule for the agent recognises its path.
agent=$dir/agent/node_modules/@anthropic-ai/claude-code/bin/claude.exe
mkdir -p "${agent%/*}"
cp /bin/bash "$agent"
echo 4249 >/proc/sys/kernel/ns_last_pid
$as_user "$agent" -c 'sleep 1000 & REAPER_KEEP=1 sleep 1000 & wait' &
test "$!" = 4250

"$reaper" daemon --observe --no-pin --scope $$ --config "$dir/config.toml" \
    --runtime-dir "$dir/run" --journal-dir "$dir/journal" >"$dir/daemon.log" 2>&1 &
tries=300
until socket=$(ls "$dir"/run/*.sock 2>/dev/null); do
    tries=$((tries - 1))
    test $tries -gt 0 || { cat "$dir/daemon.log"; exit 1; }
    sleep 0.1
done

cd "$dir/work"
requests() {
    HOME=$dir/work SCHEMATHESIS_HOOKS=$dir/unix_socket.py REAPER_SOCKET=$socket "$@" \
        run http://localhost/v1/openapi.json --checks all --request-timeout 20 --warnings off \
        --generation-database none --seed 1 --output-truncate false --max-time "$seconds"
}
schemathesis="$dir/venv/bin/python $dir/venv/bin/schemathesis --no-color"
seconds=18
requests $as_user $schemathesis
# As root, for the responses that other users do not get.
seconds=10
requests $schemathesis
