# SPDX-License-Identifier: Apache-2.0
#
# Thin: each target calls one tool. `make help` lists them.

export PATH := $(PATH):$(HOME)/.cargo/bin

CARGO ?= cargo
LAB = $(CARGO) run --quiet --release -p lab --
CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vhost-blk
LAB_KERNELS = debug,6.12,sid
# A command with QEMU's programs: those of the cache, if they are not installed.
WITH_QEMU = qemu=$$($(LAB) qemu-path) && PATH="$$PATH$${qemu:+:$$qemu}"
# Goals that this machine has met; not for a part of the benchmark with a name, or with --baseline.
KEEP_GOALS = $(if $(filter --%,$(or $(firstword $(ARGS)),--)),$(if $(findstring --baseline,$(ARGS)),,\
	--keep-goals "$(CACHE)/bench-goals.json"))
LAB_DISK = $(if $(DISK),--disk "$(DISK)")

.DEFAULT_GOAL := help
.PHONY: help setup run lab-shell vm-shell modules deb lab deb-lab soak demo-storage test bench bench-lab bench-guest report lint

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Install the Debian packages that all targets need; removes nothing [ARGS=--dry-run: only show]
	@scripts/setup.sh $(ARGS)

run: release ## A real guest formats, writes, verifies and measures a served disk [DISK=path FORMAT=1]
	@$(LAB) demo $(LAB_DISK) $(if $(filter 1 yes true,$(FORMAT)),--format) $(ARGS)

lab-shell: release ## A prompt in a guest that has the served disk as /dev/vda [DISK=path]
	@$(LAB) demo-shell $(LAB_DISK) $(ARGS)

modules: ## Build the kernel modules [KDIR=build directory; default: Debian's newest 6.12]
	@scripts/setup.sh modules
	@scripts/kernel/modules.sh $(if $(KDIR),"$(KDIR)") $(ARGS)

deb: ## Build the Debian packages of the daemon and of both modules, into target/deb
	@scripts/setup.sh deb
	@scripts/deb.sh $(ARGS)

vm-shell: programs ## A prompt in a VM with the kernel module loaded [KERNEL=6.12|sid|debug]
	@$(LAB) shell $(if $(KERNEL),--kernel $(KERNEL)) $(ARGS)

lab: programs ## All cases of the kernel modules, in VMs with three kernels [KERNEL=...] [CASE=NAME]
	@$(if $(CASE),,$(WITH_QEMU) scripts/qcow2-long.sh)
	@scripts/suite.sh
	@$(LAB) run --kernel $(or $(KERNEL),$(LAB_KERNELS)) $(if $(CASE),"$(CASE)",--set gating,plain,uring,full,nested,guest,guest-full,ceph) $(ARGS)

soak: release ## A guest verifies its data while its disk is operated, killed and broken [EVENTS=N] [MINUTES=N] [SEED=N]
	@$(LAB) soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(EVENTS),--events $(EVENTS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

demo-storage: programs ## The life of a disk, told: qcow2, snapshot, backup, growth, a move on NVMe/TCP, a lost path
	@$(LAB) run --kernel 6.12 --show --report target/lab/demo-storage $(ARGS) demo-storage

deb-lab: programs ## Use the packages in VMs with Debian 12 and 13: upgrade, removal, DKMS, a guest of libvirt
	@scripts/setup.sh deb
	@$(LAB) run --kernel 6.12 --set debian12,debian13,libvirt $(ARGS)

test: ## All tests but the longer sets of the lab; the last line counts them
	@scripts/test.sh

bench: ## Compare with qemu-storage-daemon and bare fio [ARGS="--peer NAME=SOCKET"]
	@scripts/setup.sh build bench
	@$(CARGO) build --release -p vhost-blk -p lab
	@$(WITH_QEMU) $(CARGO) run --quiet --release -p bench -- $(KEEP_GOALS) $(ARGS)

bench-lab: programs ## Measure in lab VMs: host side, path lengths, inner guests [ARGS="--quick"]
	@scripts/bench-lab.sh $(ARGS)

bench-guest: programs ## Compare all ways to attach a disk to a guest on this machine, which needs KVM [ARGS="--rounds 5"]
	@scripts/setup.sh bench
	@$(LAB) bench-guest -- $(ARGS)

report: release ## Measure and write report/index.html, report.md, report.json [QUICK=1] [PARTS=native|all] [ARGS=...]
	@$(WITH_QEMU) scripts/report.sh

lint: ## Formatting, clippy, rustdoc, shell, checkpatch, sparse, licences, documents, prose
	@scripts/lint.sh

.PHONY: release
release:
	@scripts/setup.sh build run
	@$(CARGO) build --release -p vhost-blk -p lab

# What runs in the lab's VMs.
.PHONY: programs
programs:
	@scripts/setup.sh build lab
	@$(CARGO) build --release -p vhost-blk -p lab -p cases -p bench
