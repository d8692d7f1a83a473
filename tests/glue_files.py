"""GLUE's files in a few rows each, laid out as the benchmark publishes them."""

import gzip

ROWS = {
    "cola": [
        'gj04\t1\t\tThe sailors rode.',
        'gj04\t0\t*\tSailors the "rode.',
    ],
    "sst2": [
        'sentence\tlabel',
        'a charming journey . \t1',
        'flat \t0',
    ],
    "mrpc": [
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String',
        '1\t11\t12\tHe said so.\t"He said so.',
        '0\t13\t14\tA bank.\tA shop.',
    ],
    "stsb": [
        'index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore',
        '0\tg\tf\t2012\t1\tnone\tnone\tA man.\tA boy.\t3.800',
        '1\tg\tf\t2012\t4\tnone\tnone\tA dog.\tThe dog.\t5.000',
    ],
    "qqp": [
        'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate',
        '133273\t1\t2\tHow is it?\tHow was it?\t0',
        '402555\t3\t4\tWhy "so"?\tWhy?\t1',
        '402556\t5\t6\tbroken',
        'off?\tWhat?\t0',
    ],
    "mnli": [
        'index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t'
        'sentence1_parse\tsentence2_parse\t'
        'sentence1\tsentence2\tlabel1\tgold_label',
        '0\t1\t1n\tfiction\t( a )\t( b )\t'
        '(S a)\t(S b)\tIt rains.\tIt is dry.\tneutral\tcontradiction',
        '1\t2\t2e\tletters\t( c )\t( d )\t(S c)\t(S d)\t'
        'He ate.\tHe was there.\tneutral\tentailment',
    ],
    "qnli": [
        'index\tquestion\tsentence\tlabel',
        '7\tWhen?\tIn 1970.\tentailment',
        '8\tWhere?\tIn 1970.\tnot_entailment',
    ],
    "rte": [
        'index\tsentence1\tsentence2\tlabel',
        '0\tNo one came.\tSome came.\tnot_entailment',
        '1\tThree came.\tSome came.\tentailment',
    ],
}  # fmt: skip
FOLDERS = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP",
    "mnli": "MNLI", "qnli": "QNLI", "rte": "RTE",
}  # fmt: skip


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = ("\n".join(rows) + "\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_task(root, name, folder=None, suffix=".tsv"):
    halves = ("_matched", "_mismatched") if name == "mnli" else ("",)
    folder = root / (folder or FOLDERS[name])
    for file in ("train", *(f"dev{half}" for half in halves)):
        write(folder / f"{file}{suffix}", ROWS[name])
    return folder
