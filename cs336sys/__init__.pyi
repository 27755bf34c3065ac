from cs336sys.api import Interrupted as Interrupted
from cs336sys.api import Results as Results
from cs336sys.api import Tables as Tables
from cs336sys.api import account as account
from cs336sys.api import allreduce as allreduce
from cs336sys.api import bench as bench
from cs336sys.api import compare as compare
from cs336sys.api import ddp as ddp
from cs336sys.api import flash as flash
from cs336sys.api import memprof as memprof
from cs336sys.api import read as read
from cs336sys.api import shard as shard
from cs336sys.api import trace as trace
from cs336sys.api import tune as tune
from cs336sys.experiments.verify.library import verify as verify

__version__: str
