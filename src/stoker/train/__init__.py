"""Reference training on latents: a small operator, its loop, its checkpoints and its curves.

config.py      settings of a run
batches.py     what the loop asks of a loader, and a batch as the operator takes it
operator.py    z1 = z0 + f(z0, cond), a small transformer
evaluate.py    validation error next to persistence, and roll-out; judge.py: of one task, or of each
step.py        one optimizer step and its learning rate; ceiling.py: how long one takes that never waits
guard.py       stops at the first NaN and names the sample
stop.py        SIGTERM and SIGINT as a flag
checkpoint.py  atomic, verified, safetensors and JSON; optimizer_state.py, what of an optimizer goes in
metrics.py     one JSON line per report
curves.py      the picture; report.py, the page around it
run.py         what a run is made of: begin, save, take up again
numerics.py    what decides the last bits of a step, kept with a run
batch_size.py  the largest batch that runs; untouched.py: all put back as it was
compiling.py   `torch.compile` off, for debugging
loop.py        `train`, which puts them together
"""
