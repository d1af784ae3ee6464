from otel_rollout.view.as_text import format_trajectory as format_trajectory
from otel_rollout.view.as_text import trajectory_lines as trajectory_lines
from otel_rollout.view.html import notebook_cell as notebook_cell
from otel_rollout.view.verbs.check import check as check
from otel_rollout.view.verbs.choosing import Choice as Choice
from otel_rollout.view.verbs.choosing import lines_in_order as lines_in_order
from otel_rollout.view.verbs.list import list as list  # noqa: A004 - the verb's name
from otel_rollout.view.verbs.requirements import DEFAULT as DEFAULT
from otel_rollout.view.verbs.requirements import REQUIREMENTS as REQUIREMENTS
from otel_rollout.view.verbs.show import show as show
from otel_rollout.view.verbs.sources import ERRORS_SHOWN as ERRORS_SHOWN
from otel_rollout.view.verbs.sources import Sources as Sources
from otel_rollout.view.verbs.sources import say_above as say_above
from otel_rollout.view.verbs.sources import say_unreadable as say_unreadable
from otel_rollout.view.verbs.stats import stats as stats
from otel_rollout.view.verbs.view import view as view
from otel_rollout.view.where import Where as Where
