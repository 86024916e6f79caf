"""The demo corpus: small, real media with captions that can be checked, built on the spot without a download.

Reading order: `photos` (sources and licences), `quantiles` (real sizes), `recipe` (what each sample will be), `render`
and `clips` (drawing), `facts` (measuring), `texts` (asking), `draw` (one sample), `build` (shards), `processor` (the
estimator's config).
"""

from dataloaders.demo.build import DemoCorpus as DemoCorpus
from dataloaders.demo.build import build_demo_corpus as build_demo_corpus
from dataloaders.demo.build import corpus_fingerprint as corpus_fingerprint
from dataloaders.demo.photos import ORIGINS as ORIGINS
from dataloaders.demo.photos import PHOTOS as PHOTOS
from dataloaders.demo.processor import DEMO_PROCESSOR as DEMO_PROCESSOR
