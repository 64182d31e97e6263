// SPDX-License-Identifier: Apache-2.0
//! The documents that the case follows: their commands, and their domain with the changes that the
//! machine needs.

use anyhow::{Context, Result, ensure};

const OPERATIONS: &str = include_str!("../../../../../../docs/operations.md");
const ATTACH: &str = include_str!("../../../../../../docs/attach.md");

/// The commands of `docs/operations.md`, from the package to a guest.
#[derive(Debug)]
pub(super) struct Commands {
    pub(super) serve: String,
    pub(super) start: String,
    pub(super) grow: String,
    pub(super) limit: String,
    pub(super) watch: String,
    pub(super) end: String,
}

impl Commands {
    /// Reads them; fails if the page has more or fewer blocks.
    pub(super) fn read() -> Result<Self> {
        let blocks = blocks(OPERATIONS, "## From the package to a guest", "sh");
        let found = blocks.len();
        let [serve, start, grow, limit, watch, end] = blocks
            .try_into()
            .ok()
            .with_context(|| format!("docs/operations.md has {found} blocks of commands, not 6"))?;
        Ok(Self { serve, start, grow, limit, watch, end })
    }
}

/// Replacements in the documented domain.
struct Change {
    reason: &'static str,
    documented: &'static str,
    here: String,
}

/// The files that the guest boots, and its console's log.
#[derive(Debug)]
pub(super) struct Boot<'a> {
    pub(super) kernel: &'a str,
    pub(super) initramfs: &'a str,
    pub(super) command_line: &'a str,
    pub(super) console: &'a str,
}

/// The domain of `docs/attach.md` for this machine. Fails if the page lacks one of the changed parts.
pub(super) fn domain(boot: &Boot<'_>) -> Result<String> {
    let found = blocks(ATTACH, "## libvirt", "xml");
    ensure!(found.len() == 1, "docs/attach.md has {} domains, not one", found.len());
    let mut domain = found.into_iter().next().unwrap_or_default();
    for Change { reason, documented, here } in changes(boot) {
        let times = domain.matches(documented).count();
        ensure!(times == 1, "{reason}: the domain has `{documented}` {times} times, not once");
        domain = domain.replace(documented, &here);
    }
    Ok(domain)
}

fn changes(boot: &Boot<'_>) -> Vec<Change> {
    let Boot { kernel, initramfs, command_line, console } = boot;
    let change = |reason, documented, here: &str| Change { reason, documented, here: here.into() };
    vec![
        change("no KVM for guests", "<domain type='kvm'>", "<domain type='qemu'>"),
        change("no KVM for guests", "  <cpu mode='host-passthrough'/>\n", ""),
        change("little memory", "<memory unit='GiB'>4<", "<memory unit='MiB'>320<"),
        change("two CPUs", "<vcpu>4<", "<vcpu>2<"),
        change(
            "no bootable image",
            "<boot dev='hd'/>",
            &format!(
                "<kernel>{kernel}</kernel><initrd>{initramfs}</initrd>\
                 <cmdline>{command_line}</cmdline>"
            ),
        ),
        change(
            "no network",
            "    <interface type='network'>
      <source network='default'/>
      <model type='virtio'/>
    </interface>\n",
            "",
        ),
        change(
            "the agent's port, and a log of the console",
            "<serial type='pty'/>",
            &format!(
                "<channel type='unix'><target type='virtio' name='agent.commands'/></channel>\
                 <serial type='pty'><log file='{console}' append='on'/></serial>"
            ),
        ),
    ]
}

/// The fenced blocks of one language in a section.
fn blocks(page: &str, heading: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}");
    let level = heading.split(' ').next().unwrap_or_default();
    let mut found = Vec::new();
    let mut is_fenced = false;
    let mut block: Option<String> = None;
    let lines = page.lines().skip_while(|line| *line != heading).skip(1);
    for line in lines {
        if line.starts_with("```") {
            found.extend(block.take());
            block = (!is_fenced && line == fence).then(String::new);
            is_fenced = !is_fenced;
        } else if !is_fenced && line.split(' ').next() == Some(level) {
            break;
        } else if let Some(block) = &mut block {
            block.push_str(line);
            block.push('\n');
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_have_the_commands_and_the_domain_of_the_case() {
        let commands = Commands::read().unwrap();
        assert!(commands.serve.contains(" add data "), "{}", commands.serve);
        assert!(commands.end.contains("virsh destroy guest"), "{}", commands.end);
        let boot =
            Boot { kernel: "/k", initramfs: "/i", command_line: "quiet", console: "/console" };
        let domain = domain(&boot).unwrap();
        assert!(domain.contains("<kernel>/k</kernel><initrd>/i</initrd>"), "{domain}");
        let socket = "<source type='unix' path='/run/vhost-blk/data.sock'>";
        assert!(domain.contains(socket), "{domain}");
        assert!(commands.serve.contains("--socket-path /run/vhost-blk/data.sock"));
    }

    #[test]
    fn blocks_are_those_of_the_section_and_of_the_language() {
        let page = "```sh\nno\n```\n## One\n```sh\n# a\nb\n```\n### Part\n```xml\nc\n```\n```sh\nd\n```\n## Two\n```sh\ne\n```\n";
        assert_eq!(blocks(page, "## One", "sh"), ["# a\nb\n", "d\n"]);
        assert_eq!(blocks(page, "## One", "xml"), ["c\n"]);
        assert!(blocks(page, "## Three", "sh").is_empty());
    }
}
