#!/bin/sh
# Runs as root in a machine with systemd: runs trees whose daemons have the privileges of the service's unit. Prints "DONE N" with
# the exit status of the tests.

# A service that keeps the unit's privileges. Tests have their files in /tmp, in place of the unit's directories.
sed -e '/^Exec/d; /^Watchdog/d; s/^Type=.*/Type=exec/' \
    -e '/^\[Service\]/a ExecStart=/bin/sleep infinity\nReadWritePaths=/tmp' /root/reaper.service \
    > /run/systemd/system/privileges.service
systemctl start privileges
REAPER_TEST_PRIVILEGES_OF=$(systemctl show --property MainPID --value privileges)
echo "privileges of process $REAPER_TEST_PRIVILEGES_OF:"
grep -E '^(CapBnd|NoNewPrivs|Seccomp)' "/proc/$REAPER_TEST_PRIVILEGES_OF/status"
export REAPER_TEST_PRIVILEGES_OF REAPER_TEST_SLOWDOWN=10
/root/real --test-threads=2 @tests@
echo "DONE $?"
systemctl poweroff
