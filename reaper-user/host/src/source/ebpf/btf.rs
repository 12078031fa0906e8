//! Reads the layout of the running kernel's structures from its type information (BTF).
//!
//! The crate `btf-rs` parses all types ahead, which took 140 ms and 41 MB for one kernel. This module takes a few ms and
//! a table of offsets.
//!
//! A blob has a header, a section of types and a section of strings. Types are numbered from 1 in their order in the
//! blob. Each has 12 bytes (name, kind with a count, size or another type), followed by data that depends on its kind.
//! The blob is not trusted: every read is bounds-checked, and every walk is bounded.

use std::path::{Path, PathBuf};

use reaper_common::{ABSENT, Offsets};

/// Path of the running kernel's BTF.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// Reason why the kernel's type information cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// The file with the type information cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The blob is damaged or no BTF.
    #[error("malformed BTF at byte {at}: {what}")]
    Malformed {
        /// Offset of the defect in bytes.
        at: usize,
        /// The defect.
        what: &'static str,
    },
    /// Missing structure or `structure.member`.
    #[error("the kernel's BTF has no {0}")]
    Missing(String),
    /// The offset is not a whole number of bytes, or a bitfield is not a single bit.
    #[error("{0} is laid out in an unexpected way in the kernel's BTF")]
    Shape(String),
}

impl BtfError {
    /// Returns what the user can do.
    pub(super) fn advice(&self) -> &'static str {
        match self {
            BtfError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                "use a kernel with CONFIG_DEBUG_INFO_BTF=y, and mount sysfs"
            }
            BtfError::Read { .. } => "make this file readable for the service, or run it as root",
            BtfError::Malformed { .. } | BtfError::Missing(_) | BtfError::Shape(_) => {
                "on Linux 5.10 or later, report this as a bug, with the kernel release (`uname -r`)"
            }
        }
    }
}

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;
/// Size in bytes of the fixed part of a type.
const TYPE: usize = 12;
/// Average size in bytes of a type in a kernel's BTF.
const TYPICAL: usize = 24;
/// Limit on the members visited for one path, including nested ones. The kernel's largest structures have some hundreds.
const MEMBERS_MAX: u32 = 100_000;
/// Limit on the typedefs and qualifiers before a type, and on the depth of nested anonymous structures.
const DEPTH_MAX: u32 = 32;

mod kind {
    pub const PTR: u8 = 2;
    pub const STRUCT: u8 = 4;
    pub const UNION: u8 = 5;
    pub const ENUM: u8 = 6;
    pub const TYPEDEF: u8 = 8;
    pub const FUNC: u8 = 12;
    pub const FUNC_PROTO: u8 = 13;
    pub const ENUM64: u8 = 19;

    /// Returns whether the kind only refers to another type: typedef, volatile, const, restrict, type tag.
    pub fn is_alias(kind: u8) -> bool {
        matches!(kind, 8..=11 | 18)
    }

    /// Returns the number of bytes after the fixed part; `None` if the kind is unknown.
    pub fn extra(kind: u8, count: usize) -> Option<usize> {
        Some(match kind {
            2 | 7..=12 | 16 | 18 => 0,
            1 | 14 | 17 => 4,
            3 => 12,
            6 | 13 => 8 * count,
            4 | 5 | 15 | 19 => 12 * count,
            _ => return None,
        })
    }
}

/// Indexed type information. Holds the whole blob of some MB, so drop it after use.
pub struct Btf {
    blob: Vec<u8>,
    /// Fixed part of each type by id. Id 0 is `void`, which is not in the blob.
    types: Vec<Type>,
    /// Range of the section of strings in the blob.
    strings: std::ops::Range<usize>,
}

/// The fixed part of a type.
#[derive(Clone, Copy)]
struct Type {
    /// Byte offset of the data after the fixed part.
    body: u32,
    /// Offset of the name in the section of strings.
    name: u32,
    /// Number of members, arguments or values.
    count: u32,
    kind: u8,
    /// Whether members carry bitfield sizes.
    flag: bool,
    /// Size in bytes, or the id of another type.
    value: u32,
}

impl Type {
    const VOID: Type = Type {
        body: 0,
        name: 0,
        count: 0,
        kind: 0,
        flag: false,
        value: 0,
    };
}

/// Member of a structure or union.
#[derive(Clone, Copy)]
struct Member {
    /// Offset in bits.
    bit: u32,
    /// Width of a bitfield, 0 for an ordinary member.
    width: u32,
    /// Id of its type.
    ty: u32,
}

impl Btf {
    /// Reads and indexes the file at `path`, usually [`VMLINUX`].
    ///
    /// # Errors
    /// The file cannot be read or is malformed.
    pub fn load(path: &Path) -> Result<Btf, BtfError> {
        let blob = std::fs::read(path).map_err(|source| BtfError::Read {
            path: path.into(),
            source,
        })?;
        Btf::parse(blob)
    }

    /// Indexes a blob in this machine's byte order.
    ///
    /// # Errors
    /// [`BtfError::Malformed`].
    pub fn parse(blob: Vec<u8>) -> Result<Btf, BtfError> {
        let bad = |at, what| BtfError::Malformed { at, what };
        let field = |at| u32_at(&blob, at).ok_or(bad(at, "the header is cut off"));
        match field(0)?.to_ne_bytes() {
            [a, b, ..] if u16::from_ne_bytes([a, b]) == MAGIC => {}
            [a, b, ..] if u16::from_ne_bytes([b, a]) == MAGIC => {
                return Err(bad(0, "written in another byte order"));
            }
            _ => return Err(bad(0, "no btf magic")),
        }
        let header = field(4)? as usize;
        if header < HEADER {
            return Err(bad(4, "the header is too short"));
        }
        let section = |at: usize| {
            let start = header.checked_add(field(at)? as usize);
            let end = start.and_then(|s| s.checked_add(u32_at(&blob, at + 4)? as usize));
            match (start, end) {
                (Some(s), Some(e)) if e <= blob.len() => Ok(s..e),
                _ => Err(bad(at, "a section lies outside of the file")),
            }
        };
        let (area, strings) = (section(8)?, section(16)?);

        let mut types = Vec::with_capacity(area.len() / TYPICAL);
        types.push(Type::VOID);
        let mut at = area.start;
        while at < area.end {
            let ty = type_at(&blob, at).ok_or(bad(at, "a type is cut off"))?;
            let extra =
                kind::extra(ty.kind, ty.count as usize).ok_or(bad(at, "unknown kind of type"))?;
            types.push(ty);
            at = ty.body as usize + extra;
        }
        if at != area.end {
            return Err(bad(at, "the last type is cut off"));
        }
        Ok(Btf {
            blob,
            types,
            strings,
        })
    }

    /// Returns the offsets of the structure members that the probes read. `pid_ino` is [`ABSENT`] on kernels without
    /// that member.
    ///
    /// # Errors
    /// The kernel lacks a structure or member, which the error names.
    pub fn offsets(&self) -> Result<Offsets, BtfError> {
        let [task, signal, cred, tty, driver, pid, upid, namespace, mm] = self.structures([
            "task_struct",
            "signal_struct",
            "cred",
            "tty_struct",
            "tty_driver",
            "pid",
            "upid",
            "pid_namespace",
            "mm_struct",
        ])?;
        let [
            bprm,
            file,
            path,
            dentry,
            mount,
            vfsmount,
            css_set,
            cgroup,
            kernfs_node,
        ] = self.structures([
            "linux_binprm",
            "file",
            "path",
            "dentry",
            "mount",
            "vfsmount",
            "css_set",
            "cgroup",
            "kernfs_node",
        ])?;
        let (signal_subreaper_byte, signal_subreaper_mask) = signal.bit("is_child_subreaper")?;
        let (signal_has_subreaper_byte, signal_has_subreaper_mask) =
            signal.bit("has_child_subreaper")?;
        Ok(Offsets {
            task_pid: task.offset("pid")?,
            task_tgid: task.offset("tgid")?,
            task_real_parent: task.offset("real_parent")?,
            task_group_leader: task.offset("group_leader")?,
            task_start_boottime: task.offset("start_boottime")?,
            task_exit_code: task.offset("exit_code")?,
            task_signal: task.offset("signal")?,
            task_children: task.offset("children")?,
            task_sibling: task.offset("sibling")?,
            task_thread_node: task.offset("thread_node")?,
            task_thread_pid: task.offset("thread_pid")?,
            task_mm: task.offset("mm")?,
            task_cred: task.offset("cred")?,
            task_comm: task.offset("comm")?,
            task_cgroups: task.offset("cgroups")?,
            cred_uid: cred.offset("uid.val")?,
            cred_euid: cred.offset("euid.val")?,
            signal_live: signal.offset("live.counter")?,
            signal_thread_head: signal.offset("thread_head")?,
            signal_nr_threads: signal.offset("nr_threads")?,
            signal_group_exit_code: signal.offset("group_exit_code")?,
            signal_flags: signal.offset("flags")?,
            signal_subreaper_byte,
            signal_subreaper_mask,
            signal_has_subreaper_byte,
            signal_has_subreaper_mask,
            signal_maxrss: signal.offset("maxrss")?,
            signal_pids: signal.offset("pids")?,
            signal_tty: signal.offset("tty")?,
            tty_driver: tty.offset("driver")?,
            tty_index: tty.offset("index")?,
            driver_major: driver.offset("major")?,
            driver_minor_start: driver.offset("minor_start")?,
            pid_level: pid.offset("level")?,
            pid_numbers: pid.offset("numbers")?,
            pid_ino: optional(pid.offset("ino"))?,
            upid_nr: upid.offset("nr")?,
            upid_ns: upid.offset("ns")?,
            upid_size: upid.size()?,
            namespace_inum: namespace.offset("ns.inum")?,
            namespace_child_reaper: namespace.offset("child_reaper")?,
            mm_arg_start: mm.offset("arg_start")?,
            mm_arg_end: mm.offset("arg_end")?,
            mm_env_start: mm.offset("env_start")?,
            mm_env_end: mm.offset("env_end")?,
            mm_exe_file: mm.offset("exe_file")?,
            bprm_filename: bprm.offset("filename")?,
            bprm_file: bprm.offset("file")?,
            file_path: file.offset("f_path")?,
            path_mnt: path.offset("mnt")?,
            path_dentry: path.offset("dentry")?,
            dentry_parent: dentry.offset("d_parent")?,
            dentry_name: dentry.offset("d_name.name")?,
            mount_mnt: mount.offset("mnt")?,
            mount_parent: mount.offset("mnt_parent")?,
            mount_mountpoint: mount.offset("mnt_mountpoint")?,
            mnt_root: vfsmount.offset("mnt_root")?,
            css_set_dfl_cgrp: css_set.offset("dfl_cgrp")?,
            cgroup_kn: cgroup.offset("kn")?,
            kernfs_node_id: kernfs_node.offset("id")?,
        })
    }

    /// Returns the number of arguments that a `tp_btf` program on this tracepoint gets; `None` if the kernel lacks the
    /// tracepoint.
    pub fn tracepoint_args(&self, tracepoint: &str) -> Option<usize> {
        let typedef = self.get(
            self.ids(kind::TYPEDEF, &format!("btf_trace_{tracepoint}"))
                .next()?,
        )?;
        let pointer = self.get(typedef.value).filter(|t| t.kind == kind::PTR)?;
        let proto = self
            .get(pointer.value)
            .filter(|t| t.kind == kind::FUNC_PROTO)?;
        // The first argument is the tracer's own data, which programs do not get.
        (proto.count as usize).checked_sub(1)
    }

    /// Returns whether the kernel has a function of this name, such as a kfunc.
    pub fn has_func(&self, name: &str) -> bool {
        self.func_id(name).is_some()
    }

    /// Returns the id of the kernel's function of this name.
    pub fn func_id(&self, name: &str) -> Option<u32> {
        self.ids(kind::FUNC, name).next()
    }

    /// Returns whether the kernel has a structure of this name.
    pub fn has_struct(&self, name: &str) -> bool {
        self.structures([name]).is_ok()
    }

    /// Returns whether an enum has a value of this name, such as `BPF_FUNC_loop` of `bpf_func_id`.
    pub fn has_enum_value(&self, name: &str, value: &str) -> bool {
        [(kind::ENUM, 8), (kind::ENUM64, 12)]
            .into_iter()
            .any(|(kind, width)| {
                self.ids(kind, name)
                    .filter_map(|id| self.get(id))
                    .any(|ty| {
                        (0..ty.count)
                            .map_while(|i| u32_at(&self.blob, (ty.body + width * i) as usize))
                            .any(|n| self.named(n, value))
                    })
            })
    }

    /// Finds the structures of these names in one pass.
    fn structures<'a, const N: usize>(
        &'a self,
        names: [&'a str; N],
    ) -> Result<[Structure<'a>; N], BtfError> {
        let mut found = names.map(|name| Structure {
            btf: self,
            name,
            ids: vec![],
        });
        for (id, ty) in (0..).zip(&self.types) {
            if ty.kind == kind::STRUCT
                && let Some(s) = found.iter_mut().find(|s| self.named(ty.name, s.name))
            {
                s.ids.push(id);
            }
        }
        match found.iter().find(|s| s.ids.is_empty()) {
            Some(s) => Err(BtfError::Missing(format!("struct {}", s.name))),
            None => Ok(found),
        }
    }

    /// Returns the ids of all types of this kind and name.
    fn ids<'a>(&'a self, kind: u8, name: &'a str) -> impl Iterator<Item = u32> + 'a {
        let all = (0..).zip(&self.types);
        all.filter_map(move |(id, t)| (t.kind == kind && self.named(t.name, name)).then_some(id))
    }

    /// Returns the type with this id; `None` if none exists or it is `void`.
    fn get(&self, id: u32) -> Option<Type> {
        self.types.get(id as usize).filter(|_| id != 0).copied()
    }

    /// Returns whether the string at `offset` is `name`. Anonymous types have the empty string.
    fn named(&self, offset: u32, name: &str) -> bool {
        let strings = self.blob.get(self.strings.clone()).unwrap_or_default();
        let rest = strings.get(offset as usize..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes())
            .is_some_and(|rest| rest.first() == Some(&0))
    }

    /// Returns the type behind typedefs and qualifiers; `None` if there are more than [`DEPTH_MAX`] of them.
    fn resolve(&self, mut id: u32) -> Option<Type> {
        for _ in 0..DEPTH_MAX {
            match self.get(id)? {
                ty if kind::is_alias(ty.kind) => id = ty.value,
                ty => return Some(ty),
            }
        }
        None
    }

    /// Finds a member of the structure or union with this id, also in anonymous structures and unions within it.
    ///
    /// `depth` is the nesting so far, and `budget` the number of members that may still be visited. Returns `None` if
    /// one is exceeded.
    fn member(&self, id: u32, name: &str, depth: u32, budget: &mut u32) -> Option<Member> {
        let ty = self
            .resolve(id)
            .filter(|t| matches!(t.kind, kind::STRUCT | kind::UNION))?;
        for i in 0..ty.count {
            *budget = budget.checked_sub(1)?;
            let at = ty.body as usize + TYPE * i as usize;
            let found = u32_at(&self.blob, at)?;
            let place = u32_at(&self.blob, at + 8)?;
            let (bit, width) = if ty.flag {
                (place & 0xff_ffff, place >> 24)
            } else {
                (place, 0)
            };
            let this = Member {
                bit,
                width,
                ty: u32_at(&self.blob, at + 4)?,
            };
            if self.named(found, name) {
                return Some(this);
            }
            if self.named(found, "")
                && depth < DEPTH_MAX
                && let Some(inner) = self.member(this.ty, name, depth + 1, budget)
            {
                return Some(Member {
                    bit: bit.checked_add(inner.bit)?,
                    ..inner
                });
            }
        }
        None
    }
}

/// A structure by its name. A kernel can have several types of one name.
struct Structure<'a> {
    btf: &'a Btf,
    name: &'a str,
    /// Ids of its types, in the order of the blob.
    ids: Vec<u32>,
}

impl Structure<'_> {
    /// Returns the byte offset of a member. `path` may be a dotted path through embedded structures.
    fn offset(&self, path: &str) -> Result<u32, BtfError> {
        match self.find(path)? {
            Member { bit, width: 0, .. } if bit % 8 == 0 => Ok(bit / 8),
            _ => Err(BtfError::Shape(format!("{}.{path}", self.name))),
        }
    }

    /// Returns the byte offset and the mask of a one-bit field. Bits are numbered from the lowest.
    fn bit(&self, path: &str) -> Result<(u32, u32), BtfError> {
        match self.find(path)? {
            Member { bit, width: 1, .. } => Ok((bit / 8, 1 << (bit % 8))),
            _ => Err(BtfError::Shape(format!("{}.{path}", self.name))),
        }
    }

    /// Returns the size in bytes of the first type with this name.
    fn size(&self) -> Result<u32, BtfError> {
        let ty = self.ids.first().and_then(|&id| self.btf.get(id));
        ty.map(|t| t.value)
            .ok_or_else(|| BtfError::Missing(format!("struct {}", self.name)))
    }

    /// Finds a member by a dotted path, in the first type with this name that has it.
    fn find(&self, path: &str) -> Result<Member, BtfError> {
        let through = |id: u32| {
            let mut budget = MEMBERS_MAX;
            path.split('.').try_fold(
                Member {
                    bit: 0,
                    width: 0,
                    ty: id,
                },
                |outer, name| {
                    let inner = self.btf.member(outer.ty, name, 0, &mut budget)?;
                    Some(Member {
                        bit: outer.bit.checked_add(inner.bit)?,
                        ..inner
                    })
                },
            )
        };
        let found = self.ids.iter().find_map(|&id| through(id));
        found.ok_or_else(|| BtfError::Missing(format!("{}.{path}", self.name)))
    }
}

/// Replaces the error of a missing member by [`ABSENT`].
fn optional(offset: Result<u32, BtfError>) -> Result<u32, BtfError> {
    match offset {
        Err(BtfError::Missing(_)) => Ok(ABSENT),
        other => other,
    }
}

fn u32_at(blob: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*blob.get(at..)?.first_chunk()?))
}

/// Reads the fixed part of the type at a byte offset; `None` if it is cut off. Newer kernels use 24 bits for the count
/// and 7 for the kind. Older ones leave the upper bits zero.
fn type_at(blob: &[u8], at: usize) -> Option<Type> {
    let fixed: &[u8; TYPE] = blob.get(at..)?.first_chunk()?;
    let [n0, n1, n2, n3, i0, i1, i2, i3, v0, v1, v2, v3] = *fixed;
    let info = u32::from_ne_bytes([i0, i1, i2, i3]);
    Some(Type {
        body: u32::try_from(at + TYPE).ok()?,
        name: u32::from_ne_bytes([n0, n1, n2, n3]),
        count: info & 0xff_ffff,
        kind: (info >> 24 & 0x7f) as u8,
        flag: info >> 31 == 1,
        value: u32::from_ne_bytes([v0, v1, v2, v3]),
    })
}

#[cfg(test)]
mod tests;
