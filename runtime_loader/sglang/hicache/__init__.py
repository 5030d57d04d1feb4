"""SGLang's hierarchical cache with packed pages: host pool, storage and the identity of a page.

Private to `runtime_loader.sglang`, which uses `tier` (`HostTier`), `page_identity` (`PageSource`) and `checked_storage`
(`check_storage`). SGLang is reached through `compat`.
"""
