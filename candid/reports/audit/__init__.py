"""Everything that is known of one or more models, side by side, as one page and one JSON file."""

from candid.reports.audit.options import AuditOptions
from candid.reports.audit.output import write
from candid.reports.audit.run import Audit, audit

__all__ = ["Audit", "AuditOptions", "audit", "write"]
