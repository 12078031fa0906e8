# Whether a unit of `reaper service install` with its own program hides that of this package.
unit=/etc/systemd/system/reaper.service
has_other() { [ -f $unit ] && ! grep -q '^ExecStart=/usr/bin/reaper ' $unit; }
