//! Removes the debug information from a BPF object.

use anyhow::{Context, Result};
use object::build::elf::{Builder, SectionData};
use object::elf;

/// Removes all `.debug_*` sections and their relocations. Keeps the BTF, which the loader needs.
///
/// # Errors
/// The bytes are not a known ELF file.
pub fn debug_sections(object: &[u8]) -> Result<Vec<u8>> {
    let mut elf = Builder::read(object).context("reading the linked object")?;
    for section in &mut elf.sections {
        let name = section.name.as_slice();
        let name = name.strip_prefix(b".rel").unwrap_or(name);
        section.delete = name.starts_with(b".debug_");
    }
    elf.delete_orphans();
    // LLVM stores section names in the symbol names' section. The writer needs a separate section for them.
    if !elf
        .sections
        .iter()
        .any(|section| matches!(section.data, SectionData::SectionString))
    {
        add_section_names(&mut elf);
    }
    let mut stripped = Vec::new();
    elf.write(&mut stripped)
        .context("writing the stripped object")?;
    Ok(stripped)
}

fn add_section_names(elf: &mut Builder<'_>) {
    let names = elf.sections.add();
    names.name = b".shstrtab"[..].into();
    names.sh_type = elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debug_sections_are_removed() {
        let mut object = Builder::new(object::Endianness::Little, true);
        object.header.e_type = elf::ET_REL;
        object.header.e_machine = elf::EM_BPF;
        for name in [
            "tp_btf/exit",
            ".BTF",
            ".BTF.ext",
            ".debug_info",
            ".debug_str",
        ] {
            let section = object.sections.add();
            section.name = name.as_bytes().into();
            section.sh_type = elf::SHT_PROGBITS;
            section.sh_addralign = 1;
            section.data = SectionData::Data(name.as_bytes().into());
        }
        add_section_names(&mut object);
        let mut bytes = Vec::new();
        object.write(&mut bytes).unwrap();

        let stripped = debug_sections(&bytes).unwrap();
        let stripped = Builder::read(stripped.as_slice()).unwrap();
        let names: Vec<_> = stripped
            .sections
            .iter()
            .map(|s| s.name.to_string())
            .collect();
        assert_eq!(names, ["tp_btf/exit", ".BTF", ".BTF.ext", ".shstrtab"]);
    }
}
