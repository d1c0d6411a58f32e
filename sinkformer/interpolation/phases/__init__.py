"""The phases of the construction, one file each. Every phase returns what it made and its entry in the ledger."""
