"""A hand-made Prediction, as small as a report can be."""

from oomph.records import Alive, Allocation, Event, Moment, Peak, Prediction, Site, StepPeak

GiB = 2**30


def make_prediction(fits=None):
    """One tensor of 2 GiB, alive at the peak of the first step."""
    site = Site("a.py", 3, "f")
    one = Allocation(0, 2 * GiB, (2**29,), "float32", "aten.mm", "head", site, "loss", "activation", 1)
    return Prediction(
        gpu="rtx3090" if fits is not None else None,
        gpu_title="RTX 3090",
        capacity=24 * GiB if fits is not None else None,
        limit=23 * GiB if fits is not None else None,
        verdict={True: "fits", False: "does not fit", None: None}[fits],
        refused=one if fits is False else None,
        peak=Peak(2 * GiB, 2 * GiB, (30 if fits is False else 3) * GiB, 1, "loss", one.site),
        steps=(StepPeak(1, 2 * GiB, 2 * GiB, 0),),
        at_peak=(Alive(2 * GiB, one),),
        timeline=(Moment(1, 2 * GiB, 2 * GiB), Moment(2, 0, 2 * GiB)),
        events=(Event("mark", -1, "step 1"), Event("alloc", 0), Event("free", 0)),
        allocations=(one,),
    )
