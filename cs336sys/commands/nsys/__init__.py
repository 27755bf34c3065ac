"""Tables and pictures of ``nsys``: where the time of a step goes."""

from cs336sys.report.profile.tables import plot_profiles, plot_report, profile_tables, report_tables
