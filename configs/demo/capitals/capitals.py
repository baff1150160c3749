"""The task of the demo of a real model: name the capital of a country, and say nothing else.

Used by stages and by lm-eval: `make` is the entry of a custom stage, `capital_alone` a reward, `items` and `score`
belong to the benchmark `capitals.yaml`.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any

from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

_QUESTIONS = (
    "What is the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
)
_EXAMPLE = [
    {"role": "user", "content": "What is the capital of Italy?"},
    {"role": "assistant", "content": "Rome"},
]
"""Turns at the beginning of each prompt, as in `capitals.yaml`."""
_NUM_HELD_OUT = 48
_CAPITALS = {
    "Afghanistan": "Kabul", "Albania": "Tirana", "Algeria": "Algiers", "Angola": "Luanda", "Armenia": "Yerevan",
    "Australia": "Canberra", "Austria": "Vienna", "Azerbaijan": "Baku", "Bahrain": "Manama", "Bangladesh": "Dhaka",
    "Belarus": "Minsk", "Belgium": "Brussels", "Bolivia": "Sucre", "Botswana": "Gaborone", "Bulgaria": "Sofia",
    "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing", "Croatia": "Zagreb", "Cuba": "Havana",
    "Cyprus": "Nicosia", "Denmark": "Copenhagen", "Ecuador": "Quito", "Egypt": "Cairo", "Eritrea": "Asmara",
    "Estonia": "Tallinn", "Fiji": "Suva", "Finland": "Helsinki", "France": "Paris", "Georgia": "Tbilisi",
    "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Honduras": "Tegucigalpa", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Jamaica": "Kingston", "Japan": "Tokyo", "Jordan": "Amman",
    "Kazakhstan": "Astana", "Kenya": "Nairobi", "Kyrgyzstan": "Bishkek", "Laos": "Vientiane", "Latvia": "Riga",
    "Lebanon": "Beirut", "Liberia": "Monrovia", "Libya": "Tripoli", "Lithuania": "Vilnius",
    "Madagascar": "Antananarivo", "Malawi": "Lilongwe", "Mali": "Bamako", "Malta": "Valletta", "Moldova": "Chisinau",
    "Mongolia": "Ulaanbaatar", "Montenegro": "Podgorica", "Morocco": "Rabat", "Mozambique": "Maputo",
    "Namibia": "Windhoek", "Nepal": "Kathmandu", "Netherlands": "Amsterdam", "Nicaragua": "Managua",
    "Niger": "Niamey", "Nigeria": "Abuja", "Norway": "Oslo", "Oman": "Muscat", "Pakistan": "Islamabad",
    "Paraguay": "Asunción", "Peru": "Lima", "Philippines": "Manila", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Qatar": "Doha", "Romania": "Bucharest", "Russia": "Moscow", "Rwanda": "Kigali", "Senegal": "Dakar",
    "Serbia": "Belgrade", "Slovakia": "Bratislava", "Slovenia": "Ljubljana", "Somalia": "Mogadishu",
    "Spain": "Madrid", "Sudan": "Khartoum", "Sweden": "Stockholm", "Switzerland": "Bern", "Syria": "Damascus",
    "Tajikistan": "Dushanbe", "Tanzania": "Dodoma", "Thailand": "Bangkok", "Togo": "Lomé",
    "Tunisia": "Tunis", "Turkey": "Ankara", "Uganda": "Kampala", "Ukraine": "Kyiv", "Uruguay": "Montevideo",
    "Uzbekistan": "Tashkent", "Venezuela": "Caracas", "Vietnam": "Hanoi", "Yemen": "Sanaa", "Zambia": "Lusaka",
    "Zimbabwe": "Harare",
}  # fmt: skip


def make(stage: Stage, *, seed: int = 0) -> Outcome:
    """Write `data/train.jsonl` and `data/validation.jsonl`, with the columns `prompt`, `question` and `solution`. The
    countries of the held-out rows are in no training row."""
    train = [_row(text, country) for text in _QUESTIONS for country in _countries()[_NUM_HELD_OUT:]]
    random.Random(seed).shuffle(train)
    rows = {"train": train, "validation": held_out()}
    with replace_folder(stage.path / "data") as folder:
        for name, each in rows.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in each)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    metrics = {f"data/{name}_rows": float(len(each)) for name, each in rows.items()}
    return Outcome(outputs=("data",), metrics=metrics, info={"data": "data"})


def held_out() -> list[dict[str, Any]]:
    """Return one question about each country that no training row is about."""
    return [_row(_QUESTIONS[0], country) for country in _countries()[:_NUM_HELD_OUT]]


def capital_alone(to_be_evaluated: str, reference: str) -> float:
    """Return the reward of a completion: 1 for the capital and nothing else but punctuation, otherwise 0.

    A reward of sentences with the capital, however small, was learned in place of the task: they are right more often.
    """
    return float(to_be_evaluated.strip(string.whitespace + string.punctuation) == reference)


def items(**_: Any) -> dict[str, Any]:
    """Return the items of the benchmark as a data set of the library datasets, for `custom_dataset` of lm-eval."""
    from datasets import Dataset

    return {"test": Dataset.from_list(held_out())}


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the metrics of an item, for `process_results` of lm-eval. A full stop at the end is no error."""
    text, reference = results[0], doc["solution"]
    is_right = text.strip().removesuffix(".") == reference
    return {"exact_match": float(is_right), "reward": capital_alone(text, reference)}


def _countries() -> list[str]:
    countries = sorted(_CAPITALS)
    random.Random(0).shuffle(countries)
    return countries


def _row(text: str, country: str) -> dict[str, Any]:
    question = text.format(country)
    prompt = [*_EXAMPLE, {"role": "user", "content": question}]
    return {"prompt": prompt, "question": question, "solution": _CAPITALS[country]}
