"""Notifications for `cosmos bootstrap --notify`: a block with the address, and an automation for each kind of event.

The Prefect server sends notifications even if the machine of the run has failed; its blocks encrypt the addresses.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from cosmos_core.errors import ConfigError

CHANNELS = ("slack", "email", "webhook")
EVENT_BY_SUBJECT = {
    "failed": "cosmos.stage.failed",
    "refused by a gate": "cosmos.gate.failed",
    "waiting for approval": "cosmos.run.waiting",
    "published": "cosmos.model.published",
    "over budget": "cosmos.run.over_budget",
    "the flow run failed": "prefect.flow-run.Failed",
    "the flow run crashed": "prefect.flow-run.Crashed",
}
"""Name of the event for each kind of notification: one that `tasks.events` emits, or one of Prefect for a flow run that
may have failed before it had a run or a stage."""
_PIPELINE_TAGS: Any = [{"prefect.resource.id": "prefect.tag.cosmos"}, {"prefect.resource.id": "prefect.tag.pipeline"}]
"""Tags of the flow runs whose failure is notified: those of deployments that run a whole pipeline. Flow runs of one
stage send no notification, because they are retried after a crash."""
_STATE_MESSAGE_TEMPLATE = 'event.resource.name ~ ": {what}: " ~ event.payload.validated_state.message'
_MESSAGE_TEMPLATE = (
    'event.payload.pipeline ~ ", run " ~ event.payload.run ~ (", stage " ~ event.payload.stage if event.payload.stage '
    'else "") ~ ": {what}" ~ (": " ~ event.payload.error if event.payload.error else "") ~ (": " ~ '
    'event.payload.published if event.payload.published else "") ~ "\\n" ~ event.payload.report ~ (" " ~ '
    'event.payload.card if event.payload.card else "")'
)
"""Jinja expression of the notification text, with the path of the run's report and the URL of its artifact in
Prefect."""


def parse_notification_channels(channel_options: Sequence[str]) -> dict[str, str]:
    """Return the address of each notification channel from command-line options `CHANNEL=ADDRESS`. Raises `ConfigError`
    if an option has another form, an address is no URL, or two options name one channel."""
    address_by_channel: dict[str, str] = {}
    for option in channel_options:
        channel, _, address = option.partition("=")
        required_scheme = "mailto" if channel == "email" else "http"
        if channel not in CHANNELS or not address.startswith(required_scheme) or "://" not in address:
            # The message does not show the option, which may be an address with a secret.
            raise ConfigError(
                f"--notify {channel if channel in CHANNELS else 'CHANNEL=URL'}: write slack=https://hooks.slack.com/"
                "..., webhook=http://HOST/PATH or email=mailtos://USER:PASSWORD@SMTP_HOST?to=ADDRESS"
            )
        if channel in address_by_channel:
            raise ConfigError(f"--notify {channel} is given twice; one address per channel")
        address_by_channel[channel] = address
    return address_by_channel


def make_notification_automations(channel: str, address: str) -> Iterator[Any]:
    """Save the Prefect block with the address of a channel, and yield an automation for each kind of notification."""
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    block_id = _create_block(channel, address).save(f"cosmos-notify-{channel}", overwrite=True)
    for subject, event_name in EVENT_BY_SUBJECT.items():
        tag_filter = _PIPELINE_TAGS if event_name.startswith("prefect.") else []
        yield AutomationCore(
            name=f"cosmos: {channel} message when {subject}",
            description=f"Made by cosmos bootstrap --notify {channel}.",
            trigger=EventTrigger(expect={event_name}, match_related=tag_filter, posture=Posture.Reactive, threshold=1),
            actions=[_create_action(channel, block_id, subject)],
        )


def _create_block(channel: str, address: str) -> Any:
    from prefect.blocks.notifications import SlackWebhook
    from prefect.blocks.webhook import Webhook

    if channel == "webhook":
        return Webhook(url=address, headers={"Content-Type": "application/json"})  # type: ignore[arg-type]
    # Prefect has no block for SMTP; its block for Slack passes any other URL, such as mailto://, to Apprise.
    return SlackWebhook(url=address)  # type: ignore[arg-type]


def _create_action(channel: str, block_id: Any, subject: str) -> Any:
    from prefect.events.actions import CallWebhook, SendNotification

    text_template = _STATE_MESSAGE_TEMPLATE if EVENT_BY_SUBJECT[subject].startswith("prefect.") else _MESSAGE_TEMPLATE
    text = text_template.replace("{what}", subject)
    if channel == "webhook":
        payload = f'{{"what": {json.dumps(subject)}, "event": event.event, "text": {text}, "payload": event.payload}}'
        return CallWebhook(block_document_id=block_id, payload=f"{{{{ {payload} | tojson }}}}")
    return SendNotification(block_document_id=block_id, subject=f"cosmos: {subject}", body=f"{{{{ {text} }}}}")
