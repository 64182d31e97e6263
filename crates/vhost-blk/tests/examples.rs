// SPDX-License-Identifier: Apache-2.0
//! The hooks of `packaging/` for Proxmox VE and KubeVirt, as these programs call them.

mod common;

use common::{Place, finish, stdout};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs the hookscript of Proxmox VE with a `systemctl` that writes its arguments down, and ends with
/// this code.
fn proxmox(place: &Place, code: i32, arguments: &[&str]) -> Output {
    let systemctl = place.path("systemctl");
    let text =
        format!("#!/bin/sh\necho \"$@\" >> '{}'\nexit {code}\n", place.path("calls").display());
    fs::write(&systemctl, text).unwrap();
    fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.dir.path().display(), std::env::var("PATH").unwrap());
    let mut hook = Command::new(packaged("proxmox/vhost-blk-hook"));
    hook.args(arguments).env("PATH", path).env("VHOST_BLK_DIRECTORY", place.dir.path());
    finish(&mut hook)
}

#[test]
fn the_disks_of_a_vm_start_before_it_and_stop_after_it() {
    let place = Place::new();
    for name in ["100-root", "100-data", "1001-other", "200-root"] {
        fs::write(place.path(&format!("{name}.toml")), "").unwrap();
    }
    for phase in ["pre-start", "post-start", "pre-stop", "post-stop"] {
        let output = proxmox(&place, 0, &["100", phase]);
        assert!(output.status.success(), "{phase}: {output:?}");
    }
    let disks = "vhost-blk@100-data.service vhost-blk@100-root.service";
    let calls = fs::read_to_string(place.path("calls")).unwrap();
    assert_eq!(calls, format!("start {disks}\nstop --no-block {disks}\n"));
}

#[test]
fn a_vm_whose_disk_does_not_start_does_not_start_and_the_user_is_told() {
    let place = Place::new();
    let output = proxmox(&place, 0, &["100", "pre-start"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("write ") && stderr(&output).contains("/100-NAME.toml"));
    fs::write(place.path("100-data.toml"), "").unwrap();
    let output = proxmox(&place, 1, &["100", "pre-start"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("journalctl -u 'vhost-blk@100-*'"));
    for arguments in [&["100"][..], &["100", "later"]] {
        assert_eq!(proxmox(&place, 0, arguments).status.code(), Some(2), "{arguments:?}");
    }
}

/// A domain as KubeVirt makes it, with an element of QEMU's namespace.
const DOMAIN: &str = "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\
    <devices><disk type='file'/></devices><qemu:commandline/></domain>";

fn kubevirt(disks: Option<&str>, domain: &str) -> Output {
    let annotations = disks
        .map_or(serde_json::json!({}), |disks| serde_json::json!({ "vhost-blk/disks": disks }));
    let vmi = serde_json::json!({ "metadata": { "annotations": annotations } }).to_string();
    let mut hook = Command::new(packaged("kubevirt/onDefineDomain"));
    finish(hook.args(["--vmi", &vmi, "--domain", domain]))
}

#[test]
fn the_disks_of_the_annotation_are_added_to_the_domain_with_shared_memory() {
    let disks = r#"[{"socket": "/s/a.sock", "target": "vdb", "queues": 4},
        {"socket": "/s/b.sock", "target": "vdc"}]"#;
    let added = stdout(&kubevirt(Some(disks), DOMAIN));
    let disk = |socket: &str, target: &str, queues: u8| {
        format!(
            "<disk type=\"vhostuser\" device=\"disk\"><driver name=\"qemu\" type=\"raw\" \
             queues=\"{queues}\" /><source type=\"unix\" path=\"{socket}\"><reconnect enabled=\"yes\" \
             timeout=\"1\" /></source><target dev=\"{target}\" bus=\"virtio\" /></disk>"
        )
    };
    let disks = disk("/s/a.sock", "vdb", 4) + &disk("/s/b.sock", "vdc", 1);
    assert!(added.contains(&format!("<disk type=\"file\" />{disks}</devices>")), "{added}");
    let shared =
        "<memoryBacking><source type=\"memfd\" /><access mode=\"shared\" /></memoryBacking>";
    assert!(added.contains(shared) && added.contains("<qemu:commandline />"), "{added}");
    // Huge pages stay the source of the memory.
    let huge = "<domain><memoryBacking><hugepages/></memoryBacking><devices/></domain>";
    let added = stdout(&kubevirt(Some(r#"[{"socket": "/s", "target": "vdb"}]"#), huge));
    assert!(added.contains("<hugepages /><access mode=\"shared\" />"), "{added}");
}

#[test]
fn a_domain_without_the_annotation_stays_and_a_wrong_annotation_is_told() {
    for disks in [None, Some("[]")] {
        let same = stdout(&kubevirt(disks, DOMAIN));
        assert!(!same.contains("memoryBacking") && !same.contains("vhostuser"), "{same}");
    }
    let number = r#"[{"socket": 1, "target": "vdb"}]"#;
    for wrong in ["no list", r#"{"socket": "/s"}"#, r#"[{"target": "vdb"}]"#, r#"["vdb"]"#, number]
    {
        let output = kubevirt(Some(wrong), DOMAIN);
        assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()), "{wrong}");
        assert!(stderr(&output).contains("write a list of"), "{wrong}: {output:?}");
    }
}
