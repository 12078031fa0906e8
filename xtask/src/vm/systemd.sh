#!/bin/sh
# Runs as root in a machine with systemd. Prints "ok NAME" or "FAILED NAME: …", and at the end "DONE N" with the number of
# failures. Each tree has three processes: a plain one, one in its own session, and one that ignores SIGTERM.

failures=0
check() { # NAME ACTUAL EXPECTED
    if [ "$2" = "$3" ]; then
        echo "ok $1"
    else
        echo "FAILED $1: '$2', expected '$3'"
        failures=$((failures + 1))
    fi
}
eventually() { # SECONDS COMMAND...
    end=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.2
    done
}
count() { pgrep -c -f "^sleep $1\$"; }
gone() { [ "$(count "$1")" = 0 ]; }
alive() { [ "$(count "$1")" = 1 ]; }
tree() { # TREE PREFIX...: starts an agent, which PREFIX may run elsewhere
    tree=$1
    shift
    rm -f /tmp/agent
    "$@" /usr/local/bin/test-agent -c "sleep ${tree}1 & setsid sleep ${tree}2 & sh -c 'trap \"\" TERM; sleep ${tree}3' & \
        echo \$\$ > /tmp/agent; wait" &
    for n in 1 2 3; do eventually 60 alive "$tree$n"; done
}
end_agent() { kill -KILL "$(cat /tmp/agent)"; }
living() { echo "$(count "${tree}1")$(count "${tree}2")$(count "${tree}3")"; }
check_reaped() { # NAME
    for n in 1 2 3; do eventually 60 gone "$tree$n"; done
    check "$1" "$(living)" 000
}
main_pid() { systemctl show --property MainPID --value reaper.service; }
# Returns a number of the status.
status() { reaper status --json | grep -o "\"$1\":[0-9]*" | cut -d: -f2; }
has_would_be() { [ "$(status would_have_reaped)" -ge 3 ]; }
mode() { reaper status --json | grep -o '"mode":"[a-z]*"'; }

sleep 7777 &
setsid sleep 7778 &
mkdir -p /etc/reaper
cat > /etc/reaper/config.toml <<X
grace = "5s"
[[agent]]
name = "test-agent"
comm = "test-agent"
X

echo "install, and observe"
/root/reaper service install
check install $? 0
reaper service status
check status $? 0
tree 100
end_agent
eventually 60 has_would_be
check observe "$(living) $(mode)" '111 "mode":"observe"'
reaper service status
reaper service logs | tail -n 5
pkill -KILL -f '^sleep 100'

echo "enforce: agents of root, of another user, and in a scope"
reaper service install --enforce
check enforce $? 0
tree 101
end_agent
check_reaped agent-of-root
tree 102 setpriv --reuid 1000 --regid 1000 --clear-groups
end_agent
check_reaped agent-of-another-user
tree 103 systemd-run --quiet --scope
end_agent
check_reaped agent-in-a-scope

echo "SIGKILL of the service"
tree 104
old=$(main_pid)
kill -KILL "$old"
end_agent
check_reaped killed-service
check restarted "$([ "$(main_pid)" != "$old" ] && echo yes)" yes

echo "restart and stop in the middle of an escalation"
tree 105
end_agent
eventually 60 gone 1051
systemctl restart reaper
check_reaped restart-in-escalation
tree 106
end_agent
eventually 60 gone 1061
systemctl stop reaper
check stop-in-escalation "$(living)" 000
check unpinned "$(ls /sys/fs/bpf/reaper 2> /dev/null | wc -l)" 0
systemctl start reaper
check start $? 0

echo "upgrade with a tree alive"
tree 107
printf x >> /root/reaper
/root/reaper service install > /dev/null
check upgrade "$? $(mode)" '0 "mode":"enforce"'
end_agent
check_reaped after-upgrade

echo "watchdog"
mkdir -p /run/systemd/system/reaper.service.d
printf '[Service]\nWatchdogSec=6s\n' > /run/systemd/system/reaper.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart reaper
tree 108
old=$(main_pid)
kill -STOP "$old"
end_agent
check_reaped watchdog
check restarted-by-watchdog "$([ "$(main_pid)" != "$old" ] && echo yes)" yes

echo "restart of journald"
systemctl restart systemd-journald
tree 109
end_agent
check_reaped restarted-journald
# CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE, CAP_SYS_NICE and CAP_BPF, in each thread.
check privileges "$(grep -h CapPrm "/proc/$(main_pid)/task/"*/status | sort -u | cut -f2)" 0000008000880024

echo "a daemon that was started by hand"
systemctl stop reaper
reaper daemon --observe > /dev/null 2>&1 &
by_hand=$!
eventually 60 test -S /run/reaper/reaper.sock
reaper service install
check install-beside-daemon $? 4
reaper service uninstall
check uninstall-beside-daemon $? 4
kill $by_hand
wait $by_hand

echo "uninstall"
/root/reaper service install > /dev/null
reaper service uninstall
check uninstall $? 0
left=$(ls -d /usr/local/bin/reaper /etc/systemd/system/reaper* /sys/fs/bpf/reaper /run/reaper 2> /dev/null)
check nothing-left "$left" ""
check canaries "$(count 7777)$(count 7778)" 11

echo "poweroff with leftovers that ignore SIGTERM, in a scope and in a service"
/root/reaper service install --enforce > /dev/null
tree 110 systemd-run --quiet --scope
systemd-run --quiet --collect /usr/local/bin/test-agent -c "sh -c 'trap \"\" TERM; sleep 1203' & wait"
eventually 60 alive 1203
echo "DONE $failures"
systemctl poweroff
