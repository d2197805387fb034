"""The schema of the first release, from which later migrations lead on.

A new database gets its tables from `rollyard_api.storage.schema` and is marked with the last revision.
Therefore this migration, which no database precedes, is never run.
"""

from __future__ import annotations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
