# Installs, upgrades, removes and purges the packages in /packages, as root of a directory with a small Debian. It has
# neither a service manager nor /sys, so nothing is started and nothing outside is reached.
set -eu
export DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin

fail() {
    echo "error: $*" >&2
    exit 1
}

present() {
    for path; do [ -e "$path" ] || [ -L "$path" ] || fail "$path is missing after $step"; done
}

absent() {
    for path; do if [ -e "$path" ] || [ -L "$path" ]; then fail "$path is left after $step"; fi; done
}

# What a service and an administrator leave on a host.
use() {
    mkdir -p /var/lib/reaper
    echo journal >/var/lib/reaper/journal.db
    echo '# edited' >>/etc/reaper/config.toml
}

used() {
    present /var/lib/reaper/journal.db
    grep -qx '# edited' /etc/reaper/config.toml || fail "the edited config was replaced by $step"
}

wanted=/etc/systemd/system/multi-user.target.wants/reaper.service
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
find / -xdev -name '*reaper*' -not -path '/packages/*' | sort >/before

step="the installation of the .deb"
dpkg --install /packages/old.deb
present /usr/bin/reaper /usr/lib/systemd/system/reaper.service /usr/share/man/man1/reaper.1.gz $wanted
grep -qx 'mode = "observe"' /etc/reaper/config.toml || fail "the config does not observe after $step"
reaper --version
reaper config check
use

step="the upgrade of the .deb"
dpkg --install /packages/new.deb
[ "$(dpkg-query --show --showformat='${Version}' reaper)" = "$DEB_VERSION" ] || fail "another version after $step"
present /usr/bin/reaper $wanted
used

step="the return to an older .deb"
dpkg --install /packages/old.deb
used
dpkg --install /packages/new.deb

step="the removal of the .deb"
dpkg --remove reaper
absent /usr/bin/reaper /usr/lib/systemd/system/reaper.service /usr/share/doc/reaper
used

step="the purge of the .deb"
dpkg --purge reaper
absent /etc/reaper /var/lib/reaper $wanted
find / -xdev -name '*reaper*' -not -path '/packages/*' -not -path '/before' | sort >/after
cmp /before /after || fail "files are left after $step: $(cat /after)"

step="a purge of the installed .deb"
dpkg --install /packages/new.deb
use
dpkg --purge reaper
absent /usr/bin/reaper /etc/reaper /var/lib/reaper $wanted
echo "the .deb was installed, upgraded, removed and purged"
