"""The bytes of a checkpoint's tensors on the hub, without fetching one. Knows nothing of models."""

from kvtuner.errors import HubError
from kvtuner.exported_configs.identity.checkpoint_hash import ONE_FILE, WEIGHTS_INDEX
from kvtuner.exported_configs.identity.checkpoint_size import index_total
from kvtuner.exported_configs.identity.safetensors_header import MAX_HEADER_BYTES
from kvtuner.exported_configs.sharing.hub_client import fetch_file, list_files
from kvtuner.exported_configs.sharing.reference import HubReference


def hub_checkpoint_bytes(repo: str, revision: str | None) -> int | None:
    """The bytes of a repository's safetensors weights: its index's total, or the size of its one file.

    It is None where there are none, or where the hub does not tell.

    Raises:
        HubError: No such repository or revision, no hub, or an index that is none.
    """
    listing = list_files(repo, revision)
    if ONE_FILE in listing.sizes or WEIGHTS_INDEX not in listing.sizes:
        return listing.sizes.get(ONE_FILE)
    reference = HubReference(repo, listing.commit, WEIGHTS_INDEX)
    try:
        return index_total(fetch_file(reference, listing.sizes[WEIGHTS_INDEX], MAX_HEADER_BYTES))
    except (ValueError, RecursionError) as error:
        raise HubError(f"{reference.full_name} is no index of safetensors files ({error})") from error
