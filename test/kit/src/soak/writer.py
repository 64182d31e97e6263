# SPDX-License-Identifier: Apache-2.0
#
# Writes stamped blocks to the file `stamped` in a directory, one request at a time, past the page cache,
# and reads an earlier one back each time. Appends the microseconds of the longer of both requests to
# NAME.pauses, until NAME.stop exists. Ends with 1 at the first wrong byte, and with an exception at an I/O error.
#
# Arguments: bytes of a block, blocks, the blocks from one write to the next, milliseconds between two turns, the
# directory, and NAME. The file has all blocks from the start, so that a write changes nothing else in the file system.
import mmap, os, sys, time

BLOCK, BLOCKS, STEP, REST = map(int, sys.argv[1:5])
directory, name = sys.argv[5:]
stop = name + ".stop"
file = os.open(directory + "/stamped", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
page = mmap.mmap(-1, BLOCK)
pauses = open(name + ".pauses", "w", buffering=1)
stamps = {}


def stamp(number, slot):
    return (b"%016d%016d" % (number, slot)) * (BLOCK // 32)


def check(slot):
    got = os.preadv(file, [page], slot * BLOCK)
    if got != BLOCK or page[:] != stamp(stamps[slot], slot):
        print("wrong bytes in block", slot, "write", stamps[slot], "found", page[:64])
        sys.exit(1)


for slot in range(BLOCKS):
    page[:] = stamp(0, slot)
    os.pwrite(file, page, slot * BLOCK)
    stamps[slot] = 0
os.fsync(file)
number = 0
while not os.path.exists(stop):
    number += 1
    slot, other = number * STEP % BLOCKS, number * 91 % BLOCKS
    page[:] = stamp(number, slot)
    began = time.monotonic_ns()
    os.pwrite(file, page, slot * BLOCK)
    if number % 8 == 0:
        os.fsync(file)
    written = time.monotonic_ns()
    stamps[slot] = number
    check(other)
    longest = max(written - began, time.monotonic_ns() - written)
    pauses.write("%d\n" % (longest // 1000))
    time.sleep(REST / 1000)
for slot in stamps:
    check(slot)
print("requests", 2 * number)
