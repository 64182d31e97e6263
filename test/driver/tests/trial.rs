// SPDX-License-Identifier: Apache-2.0
//! The kernel module's trials of batch sizes: `batch_size.c` and `trial.c` in userspace, by a clock
//! and rates of the test.

use std::fs;
use std::process::Command;

const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernel/vhost_blk");

/// The kernel's headers that the two files include, as far as they use them.
const HEADERS: [(&str, &str); 2] = [
    (
        "types.h",
        "#pragma once\n#include <stdbool.h>\n#include <stdint.h>\n\
         typedef uint64_t u64;\ntypedef int64_t s64;\n",
    ),
    (
        "minmax.h",
        "#pragma once\n#define min(a, b) ((a) < (b) ? (a) : (b))\n\
         #define max_t(type, a, b) ((type)(a) > (type)(b) ? (type)(a) : (type)(b))\n",
    ),
];

/// Runs windows of 4 ms in which each size has its rate, at a load that changes by a tenth from window
/// to window. The size that grows counts as 16.
const SCENARIOS: &str = r#"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include "batch_size.h"

typedef double rate(double size);

static unsigned int size_of(unsigned int at)
{
	return vhost_blk_batch_sizes[at] ?: 16;
}

static unsigned int windows, in_trial;
/* Gain of the load from window to window. */
static double growth;

static unsigned int settled(struct vhost_blk_batch_size *size, unsigned int count, rate *rate)
{
	double steady = 1;

	in_trial = 0;
	for (unsigned int i = 0; i < count; i++) {
		double load = (steady *= 1 + growth) * (windows++ % 3 || growth ? 1.0 : 0.9);
		double requests = 1e4 * load * rate(vhost_blk_batch_size_now(size) ?: 16);
		struct vhost_blk_tally window = { .ns = 4000000, .requests = requests };

		vhost_blk_batch_size_window(size, &window);
		in_trial += !!size->trial.windows;
	}
	return size_of(size->chosen);
}

static double calls_are_dear(double size) { return size; }
static double device_waits(double size) { return 1 / size; }
static double best_at_8(double size) { return size == 8 ? 1 : 0.8; }
static double first_is_best(double size) { return size == 16 ? 1 : 0.5; }
static double all_alike(double size) { return 1; }
static double slightly_better(double size) { return size == 16 ? 1 : 1.02; }

/* A rate that varies by @noise (one standard deviation): twelve uniform numbers have a variance of 1. */
static double varying(double noise)
{
	double normal = -6;

	for (int i = 0; i < 12; i++)
		normal += drand48();
	return 1 + noise * normal;
}

/* Per cent of trials that change the choice, for one with this gain. */
static unsigned int changes(bool likely, int wanted, double gain, double noise)
{
	unsigned int ended = 0, changed = 0;
	struct vhost_blk_trial trial;

	while (ended < 2000) {
		enum vhost_blk_trial_step step = VHOST_BLK_TRIAL_NONE;

		vhost_blk_trial_init(&trial, likely);
		while (step < VHOST_BLK_TRIAL_KEEPS) {
			double rate = vhost_blk_trial_differs(&trial) ? 1 + gain : 1;
			struct vhost_blk_tally window = {
				.ns = 4000000, .requests = 1e4 * rate * varying(noise)
			};

			step = vhost_blk_trial_window(&trial, &window, wanted);
		}
		ended++;
		changed += step == VHOST_BLK_TRIAL_CHANGES;
	}
	return changed / 20;
}

static void trials(void)
{
	for (double noise = 0.05; noise < 0.3; noise *= 2) {
		printf("chance %d\n", changes(false, VHOST_BLK_TRIAL_GAIN, 0, noise) < 4);
		printf("loses %d\n", changes(false, -VHOST_BLK_TRIAL_GAIN, -0.15, noise) < 4);
	}
	printf("gains %d\n", changes(false, VHOST_BLK_TRIAL_GAIN, 0.1, 0.05) >= 98);
	printf("varies %d\n", changes(false, VHOST_BLK_TRIAL_GAIN, 0.1, 0.15) >= 90);
	printf("accepts %d\n", changes(false, -VHOST_BLK_TRIAL_GAIN, 0, 0.05) >= 98);
	printf("likely %d\n", changes(true, -VHOST_BLK_TRIAL_GAIN, 0.2, 0.25) >= 85);
	printf("unlikely %d\n", changes(true, -VHOST_BLK_TRIAL_GAIN, -0.3, 0.25) < 5);
	printf("nothing %d\n", changes(false, VHOST_BLK_TRIAL_GAIN, 0, 0));
}

int main(void)
{
	struct vhost_blk_batch_size size;
	unsigned int few, many;

	vhost_blk_batch_size_init(&size);
	printf("begins %u\n", vhost_blk_batch_size_now(&size));
	printf("grows %u\n", settled(&size, 2000, calls_are_dear));
	printf("follows %u\n", settled(&size, 9000, device_waits));
	vhost_blk_batch_size_init(&size);
	printf("middle %u\n", settled(&size, 2000, best_at_8));
	printf("keeps %u\n", settled(&size, 2000, best_at_8));
	vhost_blk_batch_size_init(&size);
	printf("alike %u\n", settled(&size, 10000, all_alike));
	settled(&size, 10000, all_alike);
	printf("rare %d\n", in_trial < 1000);
	vhost_blk_batch_size_init(&size);
	printf("noise %u\n", settled(&size, 4000, slightly_better));
	vhost_blk_batch_size_init(&size);
	settled(&size, 1000, first_is_best);
	few = in_trial;
	vhost_blk_batch_size_init(&size);
	settled(&size, 1000, all_alike);
	many = in_trial;
	printf("short %d\n", few * 3 < many);
	vhost_blk_batch_size_init(&size);
	settled(&size, 20, all_alike);
	vhost_blk_trial_abandon(&size.trial);
	printf("abandoned %u %u\n", size.trial.windows, size.trial.until);
	vhost_blk_batch_size_init(&size);
	growth = 0.04;
	printf("steady %u\n", settled(&size, 300, all_alike));
	trials();
	return 0;
}
"#;

#[test]
fn batch_sizes_of_the_module_follow_the_rates() {
    let directory = tempfile::tempdir().expect("a directory for the C program");
    fs::create_dir(directory.path().join("linux")).expect("a directory for the headers");
    for (name, text) in HEADERS {
        fs::write(directory.path().join("linux").join(name), text).expect("a header is written");
    }
    let (file, binary) = (directory.path().join("trial.c"), directory.path().join("trial"));
    fs::write(&file, SCENARIOS).expect("the C program is written");
    let sources = ["batch_size.c", "trial.c"].map(|name| format!("{MODULE}/{name}"));
    let includes = ["-I".as_ref(), directory.path().as_os_str(), "-I".as_ref(), MODULE.as_ref()];
    let checks = ["-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover=all"];
    let mut compiler = Command::new("cc");
    compiler.args(checks).args(includes).arg(&file).args(sources).arg("-o").arg(&binary);
    assert!(compiler.status().expect("cc is installed").success(), "it does not compile");
    let output = Command::new(&binary).output().expect("the C program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).expect("text");
    let expected = [
        "begins 0",
        "grows 64",
        "follows 2",
        "middle 8",
        "keeps 8",
        "alike 16",
        "rare 1",
        "noise 16",
        "short 1",
        "abandoned 0 0",
        "steady 16",
        "chance 1",
        "loses 1",
        "chance 1",
        "loses 1",
        "chance 1",
        "loses 1",
        "gains 1",
        "varies 1",
        "accepts 1",
        "likely 1",
        "unlikely 1",
        "nothing 0",
    ];
    assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
}
