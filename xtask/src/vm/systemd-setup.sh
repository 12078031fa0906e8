set -e
root=$1 archive=$2
rm -rf $root/usr/share/doc $root/usr/share/man $root/usr/share/locale $root/var/cache/apt $root/var/lib/apt/lists
chroot $root useradd --create-home --shell /bin/sh user
# The agent is a copy of bash under another name.
install $root/bin/bash $root/usr/local/bin/test-agent
# Root of a container.
box=$root/srv/box
for file in $(chroot $root ldd /bin/bash /bin/sleep /usr/bin/setsid | grep -o '/lib[^ :]*') \
    /bin/sh /bin/sleep /usr/bin/setsid /usr/local/bin/test-agent; do
    install -D $root$file $box$file
done
chroot $root chown -R user /srv/box
# The root file system is the initramfs, which cannot be replaced by another.
printf '[engine]\nno_pivot_root = true\n' > $root/etc/containers/containers.conf
wants=$root/etc/systemd/system/multi-user.target.wants
mkdir -p $wants
ln -sf ../test.service $wants/test.service
ln -sf /dev/null $root/etc/systemd/system/serial-getty@ttyS0.service
ln -sf /lib/systemd/systemd $root/init
cd $root
find . | cpio --quiet -o -H newc > $archive
chmod a+r $archive
