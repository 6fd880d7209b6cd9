"""Object stores: `s3://`, `gs://`, `az://`. Opening, time-outs, retries, conditional writes.

Other packages use `bert_core.files`, which reaches buckets through this one. obstore makes the
requests. It is imported when the first bucket is opened; local files do not need it.
"""

from bert_core.storage.bucket import Bucket, open_bucket
from bert_core.storage.filesystem import filesystem
from bert_core.storage.location import IN_A_URI, opens
from bert_core.storage.retries import give_up_after

__all__ = ["IN_A_URI", "Bucket", "filesystem", "give_up_after", "open_bucket", "opens"]
