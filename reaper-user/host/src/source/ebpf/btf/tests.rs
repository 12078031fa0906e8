//! Tests with constructed and damaged blobs, and with the running kernel's BTF.

use super::*;

fn one<'a>(btf: &'a Btf, name: &'a str) -> Result<Structure<'a>, BtfError> {
    btf.structures([name]).map(|[s]| s)
}

/// Builder of a blob.
struct Build {
    types: Vec<u8>,
    strings: Vec<u8>,
}

impl Build {
    fn new() -> Build {
        Build {
            types: vec![],
            strings: vec![0],
        }
    }
    fn string(&mut self, s: &str) -> u32 {
        let at = self.strings.len() as u32;
        self.strings.extend(s.bytes().chain([0]));
        if s.is_empty() { 0 } else { at }
    }
    fn words(&mut self, words: &[u32]) {
        self.types
            .extend(words.iter().flat_map(|w| w.to_ne_bytes()));
    }
    fn ty(&mut self, name: &str, kind: u8, count: u32, value: u32) {
        let name = self.string(name);
        self.words(&[name, 1 << 31 | u32::from(kind) << 24 | count, value]);
    }
    /// Adds a member of type `ty` at `bit`.
    fn member(&mut self, name: &str, ty: u32, bit: u32, width: u32) {
        let name = self.string(name);
        self.words(&[name, ty, width << 24 | bit]);
    }
    fn blob(&self) -> Vec<u8> {
        let (t, s) = (self.types.len() as u32, self.strings.len() as u32);
        let magic = u32::from_ne_bytes({
            let [a, b] = MAGIC.to_ne_bytes();
            [a, b, 1, 0]
        });
        let mut blob: Vec<u8> = [magic, HEADER as u32, 0, t, t, s]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect();
        blob.extend(&self.types);
        blob.extend(&self.strings);
        blob
    }
}

/// `struct outer { int; union { struct inner { int x; int y:1 } ; } ; typedef inner named; }`
fn sample() -> Vec<u8> {
    let mut b = Build::new();
    b.ty("int", 1, 0, 4); // 1
    b.words(&[32]);
    b.ty("inner", kind::STRUCT, 2, 8); // 2
    b.member("x", 1, 0, 0);
    b.member("y", 1, 37, 1);
    b.ty("", kind::UNION, 1, 8); // 3
    b.member("", 2, 0, 0);
    b.ty("inner_t", kind::TYPEDEF, 0, 2); // 4
    b.ty("outer", kind::STRUCT, 3, 24); // 5
    b.member("first", 1, 0, 0);
    b.member("", 3, 64, 0);
    b.member("named", 4, 128, 0);
    b.ty("", kind::FUNC_PROTO, 3, 0); // 6
    b.words(&[0, 1, 0, 1, 0, 1]);
    b.ty("", kind::PTR, 0, 6); // 7
    b.ty("btf_trace_thing", kind::TYPEDEF, 0, 7); // 8
    b.ty("a_kfunc", kind::FUNC, 0, 6); // 9
    b.ty("ids", kind::ENUM, 2, 4); // 10
    for name in ["ID_A", "ID_B"] {
        let name = b.string(name);
        b.words(&[name, 0]);
    }
    b.ty("pid", kind::STRUCT, 1, 8); // 11
    b.member("level", 1, 0, 0);
    b.blob()
}

#[test]
fn members_are_found_through_anonymous_and_named_structures() {
    let btf = Btf::parse(sample()).unwrap();
    let outer = one(&btf, "outer").unwrap();
    assert_eq!(outer.offset("first").unwrap(), 0);
    assert_eq!(outer.offset("x").unwrap(), 8);
    assert_eq!(outer.offset("named").unwrap(), 16);
    assert_eq!(outer.offset("named.x").unwrap(), 16);
    assert_eq!(outer.bit("y").unwrap(), (12, 1 << 5));
    assert_eq!(outer.bit("named.y").unwrap(), (20, 1 << 5));
    assert_eq!(outer.size().unwrap(), 24);
}

#[test]
fn errors_name_what_is_missing() {
    let btf = Btf::parse(sample()).unwrap();
    let outer = one(&btf, "outer").unwrap();
    assert_eq!(
        outer.offset("named.z").unwrap_err().to_string(),
        "the kernel's BTF has no outer.named.z"
    );
    assert_eq!(
        btf.offsets().unwrap_err().to_string(),
        "the kernel's BTF has no struct task_struct"
    );
    assert!(matches!(outer.offset("y"), Err(BtfError::Shape(_))));
    assert!(matches!(outer.bit("x"), Err(BtfError::Shape(_))));
    assert_eq!(
        optional(one(&btf, "pid").unwrap().offset("ino")).unwrap(),
        ABSENT
    );
    let unreadable = Btf::load(Path::new("/nonexistent/btf"))
        .err()
        .unwrap()
        .to_string();
    assert!(
        unreadable.starts_with("cannot read /nonexistent/btf: "),
        "{unreadable}"
    );
}

#[test]
fn tracepoints_functions_and_enums_are_found() {
    let btf = Btf::parse(sample()).unwrap();
    assert_eq!(btf.tracepoint_args("thing"), Some(2));
    assert_eq!(btf.tracepoint_args("other"), None);
    assert!(btf.has_func("a_kfunc") && !btf.has_func("thing"));
    assert!(btf.has_struct("outer") && !btf.has_struct("ids"));
    assert!(btf.has_enum_value("ids", "ID_B"));
    assert!(!btf.has_enum_value("ids", "ID_C") && !btf.has_enum_value("outer", "ID_B"));
}

/// Queries a blob, which must not panic.
fn query(blob: Vec<u8>) {
    if let Ok(btf) = Btf::parse(blob) {
        let _ = btf.offsets();
        let _ = btf.tracepoint_args("thing");
        let _ = btf.has_enum_value("ids", "ID_C");
        if let Ok(outer) = one(&btf, "outer") {
            let _ = (outer.offset("named.none"), outer.bit("y"), outer.size());
        }
    }
}

#[test]
fn truncated_blob_is_refused() {
    let whole = sample();
    for len in 0..whole.len() {
        assert!(
            matches!(
                Btf::parse(whole[..len].to_vec()),
                Err(BtfError::Malformed { .. })
            ),
            "{len}"
        );
    }
}

#[test]
fn damaged_blobs_do_not_panic() {
    let whole = sample();
    for at in 0..whole.len() {
        for value in [0, 1, 4, 0x7f, 0x84, 0xff] {
            let mut blob = whole.clone();
            blob[at] = value;
            query(blob);
        }
    }
    // xorshift: random bytes behind a valid header, the same ones on every run.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..2000 {
        let mut blob = whole.clone();
        for byte in &mut blob[HEADER..] {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            if state.is_multiple_of(16) {
                *byte = (state >> 32) as u8;
            }
        }
        query(blob);
    }
}

#[test]
fn recursive_types_end() {
    let mut b = Build::new();
    b.ty("loop_t", kind::TYPEDEF, 0, 1); // 1: a typedef of itself
    b.ty("outer", kind::STRUCT, 64, 8); // 2: contains itself many times
    for _ in 0..64 {
        b.member("", 2, 0, 0);
    }
    let btf = Btf::parse(b.blob()).unwrap();
    assert!(btf.resolve(1).is_none());
    assert!(one(&btf, "outer").unwrap().offset("x").is_err());
}

#[test]
fn offsets_of_the_running_kernel_are_found() {
    if !Path::new(VMLINUX).exists() {
        eprintln!("skipped: no {VMLINUX} here");
        return;
    }
    let btf = Btf::load(Path::new(VMLINUX)).unwrap();
    let o = btf.offsets().unwrap();
    assert_eq!(o.task_tgid, o.task_pid + 4);
    assert_eq!(o.task_sibling, o.task_children + 16);
    assert_eq!(o.mm_arg_end, o.mm_arg_start + 8);
    assert_eq!(o.upid_size, 16);
    assert_eq!((o.path_mnt, o.path_dentry), (0, 8));
    assert_eq!(
        o.signal_subreaper_mask.count_ones() + o.signal_has_subreaper_mask.count_ones(),
        2
    );
    assert!(matches!(
        btf.tracepoint_args("sched_process_exit"),
        Some(1 | 2)
    ));
    assert_eq!(btf.tracepoint_args("sched_process_fork"), Some(2));
    assert!(btf.has_func("do_exit") && !btf.has_func("no_such_function"));
    assert!(btf.has_enum_value("bpf_func_id", "BPF_FUNC_ringbuf_reserve"));
}
