# race corpus
# rule = "Any number of streams read a constant at once; who changes it waits for each of them"
# source = "Driver API, Stream Management, cuStreamWaitEvent"
# [expect]
# racy = [["race-war", "last-reader", "change"]]
# fixed = []
# ---
import sys

from race_kernels import copy, fill

import cudatool as ct

constant, results = ct.ones(64), [ct.zeros(64) for _ in range(3)]
main, readers, changed = ct.Stream(), [ct.Stream() for _ in range(3)], ct.Event()
ct.synchronize()
for step in range(3):
    fill(main, constant, float(step))  # @change
    changed.record(main)
    for number, (reader, result) in enumerate(zip(readers, results, strict=True)):
        reader.wait_event(changed)
        if number == 2:
            copy(reader, result, constant)  # @last-reader
        else:
            copy(reader, result, constant)
        if number < 2 or sys.argv[1] == "fixed":
            main.wait_event(reader.record_event())
ct.synchronize()
