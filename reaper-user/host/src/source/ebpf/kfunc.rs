//! Patches calls of kernel functions (kfuncs) into the probes.
//!
//! The compiler cannot emit these calls. The probes call placeholder numbers instead, which this module replaces by the
//! BTF ids of the functions in the running kernel.

use object::elf::{EM_BPF, FileHeader64, SHF_EXECINSTR, SHT_PROGBITS};
use object::endian::LittleEndian;
use object::read::elf::{FileHeader, SectionHeader};
use reaper_common::{KFUNC_SEND_SIGNAL_TASK, KFUNC_TASK_FROM_PID, KFUNC_TASK_RELEASE};

use super::btf::Btf;

/// Placeholder numbers and names of the functions.
const KFUNCS: [(usize, &str); 3] = [
    (KFUNC_TASK_FROM_PID, "bpf_task_from_pid"),
    (KFUNC_TASK_RELEASE, "bpf_task_release"),
    (KFUNC_SEND_SIGNAL_TASK, "bpf_send_signal_task"),
];

/// `BPF_JMP | BPF_CALL` and `BPF_PSEUDO_KFUNC_CALL` of include/uapi/linux/bpf.h.
const CALL: u8 = 0x85;
const PSEUDO_KFUNC_CALL: u8 = 2;
/// `BPF_LD | BPF_DW | BPF_IMM`, which takes two slots.
const LOAD_DOUBLE: u8 = 0x18;
const SLOT: usize = 8;

/// Returns whether the probes can send signals: the kernel has the functions and runs `sched_process_exit` early enough.
///
/// Since Linux 6.16 this tracepoint has two arguments and runs before the process frees its memory, when signals can
/// still be sent.
pub fn has_all(btf: &Btf) -> bool {
    KFUNCS.iter().all(|(_, name)| btf.has_func(name))
        && btf.tracepoint_args("sched_process_exit") == Some(2)
}

/// Replaces the placeholder numbers by the ids of this kernel; `None` if the object is malformed or the kernel lacks a
/// function.
pub fn patch(object: &[u8], btf: &Btf) -> Option<Vec<u8>> {
    let ids = KFUNCS.map(|(number, name)| Some((number as u32, btf.func_id(name)?)));
    let mut patched = object.to_vec();
    for (start, end) in code(object)? {
        let mut slots = patched.get_mut(start..end)?.chunks_exact_mut(SLOT);
        while let Some(slot) = slots.next() {
            match slot {
                [LOAD_DOUBLE, ..] => drop(slots.next()),
                [CALL, registers, _, _, number @ ..] if *registers == 0 => {
                    let called = u32::from_le_bytes(number.try_into().ok()?);
                    for (stands_for, id) in ids.iter().flatten() {
                        if called == *stands_for {
                            *registers = PSEUDO_KFUNC_CALL << 4;
                            number.copy_from_slice(&id.to_le_bytes());
                        }
                    }
                }
                _ => {}
            }
        }
    }
    ids.iter().all(Option::is_some).then_some(patched)
}

/// Returns the start and end offsets of the sections with instructions; `None` if it is no well-formed BPF object.
fn code(object: &[u8]) -> Option<Vec<(usize, usize)>> {
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(object).ok()?;
    if header.e_machine(endian) != EM_BPF {
        return None;
    }
    let sections = header.section_headers(endian, object).ok()?;
    let instructions = sections.iter().filter(|section| {
        section.sh_type(endian) == SHT_PROGBITS
            && section.sh_flags(endian) & u64::from(SHF_EXECINSTR) != 0
    });
    let range = |section: &object::elf::SectionHeader64<LittleEndian>| {
        let (start, size) = section.file_range(endian)?;
        Some((
            usize::try_from(start).ok()?,
            usize::try_from(start + size).ok()?,
        ))
    };
    instructions.map(range).collect()
}
