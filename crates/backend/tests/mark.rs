// SPDX-License-Identifier: Apache-2.0
//! Marks of files, which refuse a writer.

mod common;

use backend::{File, FileError, FileOptions, Marked};
use common::{DISK, Image};

fn image() -> Image {
    Image::new(DISK, 1 << 20).expect("an image can be made")
}

fn open(image: &Image) -> Result<File, FileError> {
    File::open(&image.path, FileOptions::default())
}

/// A crash at the end of a merge leaves both marks. Without the overlay, nothing would tell that the other one is void.
#[test]
fn an_overlay_that_was_merged_into_its_backing_file_protects_it_no_more() {
    let (backing, overlay, other) = (image(), image(), image());
    let writers = [&backing, &overlay].map(|image| open(image).expect("no mark"));
    writers[0].mark(&overlay.path).expect("a mark");
    let refused = |image| match open(image) {
        Err(FileError::Marked(marked)) => marked,
        other => panic!("{other:?}"),
    };
    // Not before the merge, nor after one into another file.
    assert!(matches!(refused(&backing), Marked::Overlay { .. }));
    for merged_into in [&other.path, &overlay.path, &backing.path.join("none")] {
        assert!(writers[1].mark_merged(merged_into).expect("a mark"));
        assert!(matches!(refused(&backing), Marked::Overlay { .. }), "{merged_into:?}");
    }
    assert!(writers[1].mark_merged(&backing.path).expect("a mark"));
    assert!(matches!(refused(&overlay), Marked::Merged { .. }));
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    File::open(&backing.path, options).expect("a reader");
    assert!(writers[0].overlay().expect("a mark").is_some(), "a reader changes nothing");
    open(&backing).expect("it has the data of the disk");
    assert_eq!(writers[0].overlay().expect("no mark"), None);
    assert!(matches!(refused(&overlay), Marked::Merged { .. }));
}
