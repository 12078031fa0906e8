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
eventually() { # COMMAND...
    end=$(($(date +%s) + 150))
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.2
    done
}
# systemd-run starts a program by its path.
count() { pgrep -c -f "^[a-z/]*sleep $1\$"; }
gone() { [ "$(count "$1")" = 0 ]; }
alive() { [ "$(count "$1")" = 1 ]; }
tree() { # TREE PREFIX...: starts an agent, which PREFIX may run elsewhere, and which runs $first first
    tree=$1
    shift
    "$@" /usr/local/bin/test-agent -c "$first sleep ${tree}1 & setsid sleep ${tree}2 & \
        sh -c 'trap \"\" TERM; sleep ${tree}3' & wait" &
    for n in 1 2 3; do eventually alive "$tree$n"; done
}
first=
# The oldest: a child has the same arguments before its exec.
agent() { pgrep -o -f "^/usr/local/bin/test-agent -c .*sleep ${tree}1 "; }
end_agent() { kill -KILL "$(agent)"; }
living() { echo "$(count "${tree}1")$(count "${tree}2")$(count "${tree}3")"; }
check_reaped() { # NAME
    for n in 1 2 3; do eventually gone "$tree$n"; done
    check "$1" "$(living)" 000
}
main_pid() { systemctl show --property MainPID --value reaper.service; }
# Returns a number of the status.
status() { reaper status --json | grep -o "\"$1\":[0-9]*" | cut -d: -f2; }
has_would_be() { [ "$(status would_have_reaped)" -ge 3 ]; }
mode() { reaper status --json | grep -o '"mode":"[a-z]*"'; }

as_user() {
    setpriv --reuid user --regid user --init-groups env HOME=/home/user XDG_RUNTIME_DIR=/run/user/1000 \
        DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/1000/bus STORAGE_DRIVER=vfs "$@"
}

sleep 7777 &
setsid sleep 7778 &
dpkg-deb --extract /root/new.deb /tmp/new
cp /tmp/new/usr/bin/reaper /root/reaper
config() {
    mkdir -p /etc/reaper
    cat > /etc/reaper/config.toml << X
grace = "5s"
[[agent]]
name = "test-agent"
comm = "test-agent"
X
}
config
# An emulated processor needs longer than the minute of the unit.
mkdir -p /run/systemd/system/reaper.service.d
printf '[Service]\nTimeoutStartSec=10min\n' > /run/systemd/system/reaper.service.d/emulated.conf

echo "install, and observe"
/root/reaper service install
check install $? 0
reaper service status
check status $? 0
tree 100
end_agent
eventually has_would_be
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

echo "agents in login sessions, beside another process of the session"
beside() { printf 'sleep %s & "$0" "$@"; wait' "$1"; }
in_unit() { grep -q "$1" "/proc/$(agent)/cgroup" && echo yes; }
tree 111 su --login --command "$(beside 7801)" -- root
check session-of-root "$(in_unit /session-)" yes
end_agent
check_reaped agent-in-a-login-of-root
tree 112 su --login --command "$(beside 7802)" -- user
check session-of-another-user "$(in_unit /session-)" yes
end_agent
check_reaped agent-in-a-login-of-another-user

echo "agents below the service manager of a user"
loginctl enable-linger user
eventually test -S /run/user/1000/bus
manager=$(pgrep -u user -x systemd)
as_user systemd-run --user --quiet sleep 7803
# Otherwise systemd ends what a service leaves behind.
tree 113 as_user systemd-run --user --quiet -p KillMode=process
check service-of-a-user "$(in_unit /user@1000.service/)" yes
end_agent
check_reaped agent-in-a-service-of-a-user
first='systemd-run --user --quiet --scope sleep 7804 &' tree 114 as_user systemd-run --user --quiet --scope
eventually alive 7804
end_agent
check_reaped agent-in-a-scope-of-a-user

echo "an agent in a unit that a timer starts"
tree 115 systemd-run --quiet --on-active=1s --timer-property=AccuracySec=100ms -p KillMode=process
end_agent
check_reaped agent-of-a-timer

echo "a rootless container that an agent starts, and an agent in one"
first='podman run --network=none --detach --rootfs /srv/box sleep 7805 > /dev/null;' tree 116 as_user
eventually alive 7805
end_agent
check_reaped agent-that-starts-a-container
tree 117 as_user podman run --network=none --rootfs /srv/box sh -c '"$0" "$@"; sleep 7806'
end_agent
check_reaped agent-in-a-container
eventually alive 7806
check containers "$(pgrep -c -x conmon) $(as_user podman ps --quiet | wc -l)" "2 2"
check manager-of-the-user "$(pgrep -u user -x systemd)" "$manager"
check in-containers "$(count 7805)$(count 7806)" 11
as_user podman kill --all > /dev/null

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
eventually gone 1051
systemctl restart reaper
check_reaped restart-in-escalation
tree 106
end_agent
eventually gone 1061
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
# Long enough for an emulated processor on a busy host: otherwise the watchdog ends the service before the test stops it.
printf '[Service]\nWatchdogSec=30s\n' > /run/systemd/system/reaper.service.d/watchdog.conf
systemctl daemon-reload
systemctl restart reaper
tree 108
old=$(main_pid)
kill -STOP "$old"
end_agent
check_reaped watchdog
check restarted-by-watchdog "$([ "$(main_pid)" != "$old" ] && echo yes)" yes
rm /run/systemd/system/reaper.service.d/watchdog.conf
systemctl daemon-reload

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
eventually test -S /run/reaper/reaper.sock
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

echo "an upgrade of the package with trees alive"
package() { dpkg --force-confold --install "/root/$1.deb" > /tmp/dpkg.log 2>&1; }
package old
check package $? 0
reaper service install --enforce > /dev/null
tree 118
reaper keep "$(pgrep -f '^sleep 1181$')"
tree 119
dying=$(tree=118 agent)
closed=$(reaper history --json | head -n 5)
# The new service starts after the agent has died.
printf '[Service]\nExecStartPre=/bin/sh -c "until test -e /run/upgrade; do sleep 0.1; done"\n' \
    > /run/systemd/system/reaper.service.d/upgrade.conf
systemctl daemon-reload
old=$(main_pid)
package new &
dpkg=$!
eventually test ! -e "/proc/$old"
kill -KILL "$dying"
touch /run/upgrade
wait $dpkg
check upgrade-of-the-package "$? $(dpkg-query --show --showformat='${Version}' reaper)" "0 9.9.9-1"
rm /run/systemd/system/reaper.service.d/upgrade.conf
systemctl daemon-reload
for n in 2 3; do eventually gone 118$n; done
check orphaned-meanwhile "$(tree=118 living)" 100
check alive-meanwhile "$(living)" 111
check keep-over-the-upgrade "$(reaper keep --list --json | grep -o '"pid":[0-9]*')" \
    "\"pid\":$(pgrep -f '^sleep 1181$')"
check journal-over-the-upgrade "$([ "$(reaper history --json | head -n 5)" = "$closed" ] && echo yes)" yes
end_agent
check_reaped after-the-upgrade
pkill -KILL -f '^sleep 1181$'
# Each process that was ever signalled, by its short name. The names of its ancestors stand in braces of their own.
check signalled "$(reaper history --json | sed 's/{"entity_id"/\n&/g' | grep '"signal":"SIG' |
    sed -n 's/^{[^{}]*"process.comm":"\([^"]*\)".*/\1/p' | sort -u | xargs)" "sh sleep"
dpkg --purge reaper > /dev/null 2>&1
check purge "$? $(ls -d /usr/bin/reaper /etc/reaper /var/lib/reaper /sys/fs/bpf/reaper 2> /dev/null)" "0 "

check canaries "$(count 7777)$(count 7778)$(count 7801)$(count 7802)$(count 7803)$(count 7804)" 111111

echo "poweroff with leftovers that ignore SIGTERM, in a scope and in a service"
config
/root/reaper service install --enforce > /dev/null
tree 110 systemd-run --quiet --scope
systemd-run --quiet --collect /usr/local/bin/test-agent -c "sh -c 'trap \"\" TERM; sleep 1203' & wait"
eventually alive 1203
echo "DONE $failures"
systemctl poweroff
