"""The phases of the construction, one file each. Every phase returns its blocks and its entry in the ledger."""
