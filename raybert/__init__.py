"""raybert from Python: every stage as a function, models that answer, and servers.

    tuned = raybert.finetune(
        model="runs/pretrain", task="text-classification", train="rows.csv",
        held_out="held_out.csv", output="runs/tuned", epochs=3, num_workers=0,
    )
    print(tuned, tuned.metrics)
    raybert.load(tuned).predict(["What a fine book"])
    with raybert.serve({"reviews": tuned}) as server:
        ...  # server.url

The functions do what the commands of the same names do.
"""

from raybert.models import load as load
from raybert.server import Server as Server
from raybert.server import serve as serve
from raybert.stages import Outcome as Outcome
from raybert.stages import distill as distill
from raybert.stages import evaluate as evaluate
from raybert.stages import export as export
from raybert.stages import extract as extract
from raybert.stages import finetune as finetune
from raybert.stages import glue as glue
from raybert.stages import index as index
from raybert.stages import mine as mine
from raybert.stages import predict as predict
from raybert.stages import prepare as prepare
from raybert.stages import pretrain as pretrain
from raybert.stages import publish as publish
from raybert.stages import search as search
from raybert.stages import tune as tune
from raybert.stages import vocab as vocab
